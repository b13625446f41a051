"""What a generator's engine has done since its collector's first grant."""

from collections.abc import Mapping
from typing import Any

import anyio

from asyncrl.collectors.generators.base import Generator
from asyncrl.engine.records.engine_use import EngineUse


class EngineMeter:
    """Reads the figures of one generator."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._since = 0.0
        self._then: Mapping[str, Any] | None = None

    async def begin(self) -> None:
        """Count from now on; only the first call counts."""
        if self._then is None:
            self._then = await self._generator.stats()
            self._since = anyio.current_time()

    async def read(self) -> EngineUse | None:
        """Return totals up to now; None from a generator that does not tell for how long it was busy."""
        now, then = await self._generator.stats(), self._then
        if then is None or "busy_s" not in now:
            return None
        return EngineUse(
            up_s=anyio.current_time() - self._since,
            busy_s=now["busy_s"] - then["busy_s"],
            paused_s=now["paused_s"] - then["paused_s"],
            tokens=now["tokens"] - then["tokens"],
            running=now["running"],
            waiting=now["waiting"],
            cache_used=now["cache_used"],
        )
