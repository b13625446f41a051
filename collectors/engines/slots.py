"""Who sits in which slot, and who comes next.

Invariants: a slot holds one response; those in use are the first ones but for holes, which the next to come fill, or
the last to sit move into; a batch that is to be exact sits alone, from its first member to its last.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from asyncrl.collectors.engines.response import Response


class Slots:
    """`count` slots."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seated: list[Response | None] = []
        self._holes: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        """Return how many sit."""
        return self._used

    def __iter__(self) -> Iterator[Response]:
        """Iterate over those that sit, by slot."""
        return iter([response for response in self._seated if response is not None])

    @property
    def seated(self) -> tuple[Response | None, ...]:
        """Who sits in each slot up to the last in use."""
        return tuple(self._seated)

    @property
    def free(self) -> int:
        return self._count - self._used

    def sit(self, response: Response) -> None:
        """Give a response the first free slot."""
        if self._holes:
            slot = heappop(self._holes)
            self._seated[slot] = response
        else:
            slot = len(self._seated)
            self._seated.append(response)
        response.slot = slot
        self._used += 1

    def leave(self, response: Response) -> None:
        """Free a response's slot, if it has one."""
        if response.slot >= 0:
            self._seated[response.slot] = None
            heappush(self._holes, response.slot)
            response.slot = -1
            self._used -= 1

    def close_up(self) -> list[tuple[int, int]]:
        """Move the last to sit into holes; return (from, to) for each that moved."""
        moves = []
        for hole, held in enumerate(self._seated):
            while self._seated and self._seated[-1] is None:
                self._seated.pop()
            if held is None and hole < len(self._seated):
                last = self._seated.pop()
                assert last is not None
                moves.append((last.slot, hole))
                self._seated[hole] = last
                last.slot = hole
        self._holes.clear()
        return moves


class Batch:
    """Responses that are to decode together, apart from all others."""

    def __init__(self, responses: Sequence[Response]) -> None:
        self.waiting = deque(responses)
        self._responses = tuple(responses)

    @property
    def ended(self) -> bool:
        return all(response.ended for response in self._responses)

    def __iter__(self) -> Iterator[Response]:
        return iter(self._responses)


class Queue:
    """First come, first served; a batch waits until all slots are free, and all others wait behind it."""

    def __init__(self) -> None:
        self._waiting: deque[Response | Batch] = deque()
        self.batch: Batch | None = None
        """The batch that sits."""

    def __len__(self) -> int:
        """Return how many responses wait; those that were aborted while they did are not among them."""
        return sum(not response.ended for response in self.members())

    @property
    def mixes(self) -> bool:
        """Whether who comes next may sit beside others."""
        self._drop_ended()
        return self.batch is None and bool(self._waiting) and isinstance(self._waiting[0], Response)

    def put(self, entry: Response | Batch) -> None:
        self._waiting.append(entry)

    def members(self) -> list[Response]:
        """Return all who wait, and who did when they ended."""
        found = list(self.batch.waiting) if self.batch else []
        for entry in self._waiting:
            found += entry.waiting if isinstance(entry, Batch) else [entry]
        return found

    def next(self, *, slots_empty: bool, begun_only: bool = False) -> Response | None:
        """Take who sits next; None if nobody may. With `begun_only`, only a batch that sits goes on."""
        self._drop_ended()
        if self.batch is None and not begun_only and self._waiting:
            if isinstance(self._waiting[0], Response):
                return self._waiting.popleft()  # type: ignore[return-value]
            if slots_empty:
                entry = self._waiting.popleft()
                assert isinstance(entry, Batch)
                self.batch = entry
                return self.next(slots_empty=slots_empty)
        return self.batch.waiting.popleft() if self.batch and self.batch.waiting else None

    def _drop_ended(self) -> None:
        """Forget those that were aborted while they waited, and a batch that has ended."""
        if self.batch is not None:
            while self.batch.waiting and self.batch.waiting[0].ended:
                self.batch.waiting.popleft()
            if not self.batch.waiting and self.batch.ended:
                self.batch = None
        while self._waiting and self._waiting[0].ended:
            self._waiting.popleft()
