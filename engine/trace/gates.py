"""What holds a replay back until the log says so."""

from collections import defaultdict
from collections.abc import Hashable

import anyio


class Gates:
    """Things that happen when the log says so. Once come, a gate stays open."""

    def __init__(self) -> None:
        self._gates: defaultdict[Hashable, anyio.Event] = defaultdict(anyio.Event)

    def open(self, name: Hashable) -> None:
        self._gates[name].set()

    async def wait(self, name: Hashable) -> None:
        await self._gates[name].wait()
