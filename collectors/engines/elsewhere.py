"""What engines outside this process have in common: turns, one answer per request, and updates through a file.

Invariant: one update is under way at most, and what stages its weights is never what serves. `_control` is held by
whoever pauses, resumes or updates.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio

from asyncrl.collectors.engines.admission import Admission, Flight
from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Cache, Chunk, EngineStats, Request, Result, Update
from asyncrl.collectors.engines.state_files import StateFiles
from asyncrl.collectors.engines.stop_text import Text
from asyncrl.collectors.engines.stopwatch import Stopwatch
from asyncrl.collectors.engines.swap import START
from asyncrl.engine.errors import VersionError


class EngineElsewhere(ABC):
    """`limit()` requests of at most `max_length` tokens run at once. Stop strings need the `text` of tokens."""

    def __init__(self, *, max_length: int, limit: Callable[[], int], text: Text | None) -> None:
        self._max_length = max_length
        self._text = text
        self._admission = Admission(limit)
        self._control = anyio.Lock()
        self._version = START
        self._paused = False
        self._updating = False
        self._closed = False
        self._tokens = 0
        self._watch = Stopwatch()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        """Yield chunks as they come, then one result. Closing the iterator early aborts the request."""
        answer = Answer(request, self._text)
        fault = answer.fault(self._max_length)
        if fault:
            yield answer.result("error", fault)
            return
        flight = await self._admission.enter(request.id)
        try:
            self._watch.turn(busy=True)
            async with aclosing(self._ask(request, answer, flight)) as items:
                async for item in items:
                    yield item
        finally:
            self._admission.leave(flight)
            self._watch.turn(busy=bool(self._admission.running))

    async def resume(self) -> None:
        """Go on with what was kept and what has come since."""
        async with self._control:
            self._paused = False
            await self._go_on()

    async def update_weights(self, version: int, state: Mapping[str, Any], cache: Cache = "keep") -> Update:
        """Write all weights to where the engine reads them, then swap them; what comes after is of `version`."""
        files = await self._ready_files()
        if self._updating:
            raise VersionError(f"version {version} came while another update is under way")
        if version < self._version:
            raise VersionError(f"version {version} is older than {self._version}, which serves")
        self._updating = True
        try:
            began = anyio.current_time()
            file = await anyio.to_thread.run_sync(files.write, version, state)
            staged = anyio.current_time()
            # Cancelled in the middle, it would leave half-written weights.
            with anyio.CancelScope(shield=True):
                pause_s = await self._swap(version, file, cache)
            return Update(staged - began, pause_s, file.stat().st_size)
        finally:
            self._updating = False

    async def stats(self) -> EngineStats:
        """Return what the engine does now."""
        busy_s, paused_s = self._watch.read()
        return EngineStats(
            running=len(self._admission.running),
            waiting=self._admission.waiting,
            cache_used=self._cache_used(),
            tokens=self._tokens,
            busy_s=busy_s,
            paused_s=paused_s,
            version=self._version,
        )

    @abstractmethod
    def _ask(self, request: Request, answer: Answer, flight: Flight) -> AsyncGenerator[Chunk | Result, None]:
        """Have a response made, and yield what comes of it, last the result."""

    @abstractmethod
    async def _ready_files(self) -> StateFiles:
        """Return where weights are staged, once the engine can take any; VersionError if it never can."""

    @abstractmethod
    async def _swap(self, version: int, file: Path, cache: Cache) -> float:
        """Swap in a file's weights, which then serve, or remove it; return for how many seconds no token was made."""

    @abstractmethod
    async def _go_on(self) -> None:
        """End a pause, unless the user's own lasts."""

    def _cache_used(self) -> float:
        """Return the share of the cache in use; 0 where it is not known."""
        return 0.0
