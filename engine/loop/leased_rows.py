"""Under which fencing number each claimed group's row is held here, and acts on those that still are.

A lease may end while its owner is slow. Another owner that claims the row then gets a higher fencing number, and an act
under the lower one changes nothing (Kleppmann, "How to do distributed locking", 2016).
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from asyncrl.engine.data_plane.base import DataPlane, Lease
from asyncrl.engine.errors import ClaimLost
from asyncrl.engine.records import GroupMeta

log = structlog.get_logger()


class LeasedRows:
    """The rows that one consumer holds in one partition."""

    def __init__(self, plane: DataPlane, partition: str, consumer: str) -> None:
        self._plane = plane
        self._partition = partition
        self._consumer = consumer
        self._fences: dict[str, int] = {}

    def note(self, group: GroupMeta, fence: int) -> None:
        """Note under which number a group is held from here on."""
        self._fences[group.row] = fence

    def lease(self, groups: Iterable[GroupMeta]) -> Lease:
        """Return the numbers under which groups are held; KeyError if one is not."""
        return Lease(self._partition, self._consumer, {group.row: self._fences[group.row] for group in groups})

    def pop(self, groups: Sequence[GroupMeta]) -> Lease:
        """Return the numbers under which groups were held, and hold them no longer."""
        lease = self.lease(groups)
        for row in lease.fences:
            del self._fences[row]
        return lease

    def forget_all(self) -> None:
        """Hold nothing any longer."""
        self._fences.clear()

    async def renew(self, groups: Sequence[GroupMeta]) -> None:
        """Renew the leases of groups that are still held."""
        await self._while_leased(groups, self.lease(groups), self._plane.renew)

    async def clear(self, groups: Sequence[GroupMeta], lease: Lease) -> None:
        """Clear the keys of groups; those that another owner has claimed are left to it."""

        async def clear(held: Lease) -> None:
            keys = [key for group in groups if group.row in held.fences for key in group.keys]
            await self._plane.clear(self._partition, keys, lease=held)

        lost = await self._while_leased(groups, lease, clear)
        if lost:
            log.warning("settled groups that another owner had claimed; their keys are left to it", groups=lost)

    async def _while_leased(
        self, groups: Sequence[GroupMeta], lease: Lease, act: Callable[[Lease], Awaitable[None]]
    ) -> list[int]:
        """Call `act` on the groups that are still leased; return the numbers of the others."""
        fences = {group.row: lease.fences[group.row] for group in groups}
        while fences:
            part = Lease(self._partition, self._consumer, fences)
            try:
                await act(part)
                break
            except ClaimLost:
                held = await self._plane.leased(part)
                if len(held) == len(fences):
                    raise
                fences = {row: fence for row, fence in fences.items() if row in held}
        return [group.group for group in groups if group.row not in fences]
