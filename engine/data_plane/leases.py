"""The leases of one consumer, and its groups in the order in which claims take them.

Invariant: a group that may be claimed is in every queue. A queue may have more entries than that: each is looked
at when its turn comes, and one that cannot be claimed is dropped, since whatever changes that puts it in again.
So a claim costs what it takes and not what the partition holds.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.engine.data_plane.own_rows import OwnRows

_SPARE_ENTRIES = 256

# (version, group, row): the order of claims.
_Entry = tuple[int, int, str]


@dataclass(slots=True)
class RowLease:
    put: str
    fence: int
    owner: str
    expires: float
    is_offered: bool = False
    """Whether it ran out and its group was put into the queues again."""

    def is_free(self, now: float, owner: str = "") -> bool:
        """Return whether `owner` may take the row. A lease that ran out is free for others; its own owner is alive."""
        return self.expires < now and self.owner != owner


class Leases:
    """What one consumer has claimed. Tell it of every group that came, came back or got a column: `offer`."""

    def __init__(self, rows: OwnRows) -> None:
        self._rows = rows
        self._leases: dict[str, RowLease] = {}
        # By the later columns that a claim waits for, because a group may lack one and have another.
        self._queues: dict[tuple[str, ...], list[_Entry]] = {}
        # When leases run out, one entry per lease: (time, row, fence).
        self._ends: list[tuple[float, str, int]] = []

    def __getitem__(self, name: str) -> RowLease:
        return self._leases[name]

    def items(self) -> Iterator[tuple[str, RowLease]]:
        return iter(self._leases.items())

    def under(self, fences: Mapping[str, int]) -> list[str]:
        """Return the rows that are leased under these numbers."""
        leases = self._leases
        return [name for name, fence in fences.items() if name in leases and leases[name].fence == fence]

    def take(
        self,
        most: int,
        lease: Callable[[str], RowLease],
        *,
        now: float,
        later: tuple[str, ...],
        is_whole: Callable[[str], bool],
    ) -> list[str]:
        """Lease up to `most` groups in order, each with what `lease` makes for it; return them.

        `later` are the columns that groups must have, and `is_whole` says whether one has all that it needs.
        """
        self._offer_what_ran_out(now)
        queue = self._queue(later)
        taken: list[str] = []
        not_for_this_owner: list[_Entry] = []
        while queue and len(taken) < most:
            entry = heapq.heappop(queue)
            name = entry[-1]
            if name not in self._rows or self._rows.place(name) != entry or not is_whole(name):
                continue
            before, new = self._leases.get(name), lease(name)
            if before is None or before.is_free(now, new.owner):
                self._lease(name, new)
                taken.append(name)
            elif before.is_free(now):
                not_for_this_owner.append(entry)
        for entry in not_for_this_owner:
            heapq.heappush(queue, entry)
        return taken

    def renew(self, name: str, expires: float) -> None:
        lease = self._leases[name]
        lease.expires = expires
        if lease.is_offered:
            lease.is_offered = False
            heapq.heappush(self._ends, (expires, name, lease.fence))

    def give_back(self, name: str) -> None:
        del self._leases[name]
        self.offer(name)

    def forget(self, name: str, put: str | None) -> None:
        """Drop the lease of a row that is gone, or that another put than `put` made."""
        lease = self._leases.get(name)
        if lease is not None and lease.put != put:
            del self._leases[name]

    def offer(self, name: str) -> None:
        """Put a group in its place in every queue, since it may be claimable now."""
        entry = self._rows.place(name)
        for later, queue in self._queues.items():
            heapq.heappush(queue, entry)
            # Groups that this consumer never claims leave their entries behind.
            if len(queue) > 2 * len(self._rows) + _SPARE_ENTRIES:
                self._queues[later] = self._all()

    def _lease(self, name: str, lease: RowLease) -> None:
        # Anew, so that leases stand in the order in which they were given.
        self._leases.pop(name, None)
        self._leases[name] = lease
        heapq.heappush(self._ends, (lease.expires, name, lease.fence))
        if len(self._ends) > 2 * len(self._leases) + _SPARE_ENTRIES:
            self._ends = [(held.expires, row, held.fence) for row, held in self.items() if not held.is_offered]
            heapq.heapify(self._ends)

    def _queue(self, later: tuple[str, ...]) -> list[_Entry]:
        if later not in self._queues:
            self._queues[later] = self._all()
        return self._queues[later]

    def _all(self) -> list[_Entry]:
        entries = [self._rows.place(name) for name in self._rows.groups()]
        heapq.heapify(entries)
        return entries

    def _offer_what_ran_out(self, now: float) -> None:
        ends = self._ends
        while ends and ends[0][0] < now:
            _, name, fence = heapq.heappop(ends)
            lease = self._leases.get(name)
            if lease is None or lease.fence != fence:
                continue
            if lease.expires < now:
                lease.is_offered = True
                self.offer(name)
            else:
                heapq.heappush(ends, (lease.expires, name, fence))
