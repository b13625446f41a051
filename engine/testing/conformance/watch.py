"""A plane that passes everything on and remembers what was really done to it, and when."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from asyncrl.engine.data_plane.base import Claim, DataPlane
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.records import GroupMeta


class WatchedPlane(PassingPlane):
    """`put_at` is by group's row, in seconds of `clock`. `cleared` holds keys; `at_end` those of the first look.

    `handed_out` counts claims by group's row.
    """

    def __init__(self, plane: DataPlane, clock: Callable[[], float]) -> None:
        super().__init__(plane)
        self._clock = clock
        self.put_at: dict[str, float] = {}
        self.cleared: set[str] = set()
        self.at_end: list[str] = []
        self.handed_out: Counter[str] = Counter()

    async def put(self, partition: str, group: Any, columns: Any) -> GroupMeta:
        stored = await super().put(partition, group, columns)
        self.put_at[group.row] = self._clock()
        return stored

    async def claim(self, partition: str, consumer: str, **asked: Any) -> Claim:
        claim = await super().claim(partition, consumer, **asked)
        self.handed_out.update(group.row for group in claim.groups)
        return claim

    async def clear(self, partition: str, keys: Any, **how: Any) -> None:
        await super().clear(partition, keys, **how)
        self.cleared.update(keys)

    async def keys(self, partition: str) -> list[str]:
        """The controller looks once, at its end, for what is left; the test looks later, at nothing."""
        found = await super().keys(partition)
        self.at_end = self.at_end or found
        return found
