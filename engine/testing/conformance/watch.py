"""A plane that passes everything on and remembers what was really done to it, and when."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.testing.fakes import FaultyPlane


@dataclass(slots=True)
class WatchedPlane:
    """`put_at` is by group's row, in seconds of `clock`. `cleared` holds keys; `at_end` those of the first look.

    `handed_out` counts claims by group's row.
    """

    plane: DataPlane | FaultyPlane
    clock: Callable[[], float]
    put_at: dict[str, float] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    at_end: list[str] = field(default_factory=list)
    handed_out: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, operation: str) -> Any:
        return getattr(self.plane, operation)

    async def put(self, partition: str, group: Any, columns: Any) -> None:
        await self.plane.put(partition, group, columns)
        self.put_at[group.row] = self.clock()

    async def claim(self, *args: Any, **how: Any) -> Any:
        claim = await self.plane.claim(*args, **how)
        self.handed_out.update(group.row for group in claim.groups)
        return claim

    async def clear(self, partition: str, keys: Any, **how: Any) -> None:
        await self.plane.clear(partition, keys, **how)
        self.cleared.update(keys)

    async def keys(self, partition: str) -> list[str]:
        """The controller looks once, at its end, for what is left; the test looks later, at nothing."""
        found: list[str] = await self.plane.keys(partition)
        self.at_end = self.at_end or found
        return found
