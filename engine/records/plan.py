"""The driver's plan: for each data-parallel rank, an equal number of micro-batches of keys."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Keys that go through the model together, and their tokens.

    A filler runs forward and backward like the others, on a row of the batch, with weight zero. It keeps collectives
    in step and adds nothing to loss, counts or metrics. `cost` is the planner's prediction, in the units of its cost
    function.
    """

    keys: tuple[str, ...]
    tokens: int
    filler: bool = False
    cost: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-batches by rank. Invariant: in `lockstep`, every rank has the same number of them.

    A forward-only plan may be without lockstep. `updates` says how many micro-batches of every rank, in order, make up
    each optimizer update; empty: all are one update. Example: with `updates` (2, 1) every rank has three micro-batches,
    and the first two belong to the first update.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    lockstep: bool = True
    updates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = {len(rank) for rank in self.ranks}
        if self.lockstep and len(counts) > 1:
            raise ValueError(f"ranks differ in micro-batches: {[len(rank) for rank in self.ranks]}")
        if self.updates and counts != {sum(self.updates)}:
            raise ValueError(f"updates of {list(self.updates)} micro-batches; the ranks have {sorted(counts)}")

    @property
    def parts(self) -> tuple["Plan", ...]:
        """The plan of each optimizer update; a plan without `updates` is its only part."""
        if not self.updates:
            return (self,)
        ends = list(accumulate(self.updates, initial=0))
        return tuple(Plan(tuple(rank[start:end] for rank in self.ranks)) for start, end in pairwise(ends))

    @property
    def filler_places(self) -> tuple[tuple[int, int], ...]:
        """Rank and position of each filler, from 0, in order."""
        return tuple(
            (number, place)
            for number, rank in enumerate(self.ranks)
            for place, batch in enumerate(rank)
            if batch.filler
        )

    @property
    def keys(self) -> frozenset[str]:
        """All planned keys. A filler repeats the key of a real sample, so it adds none."""
        return frozenset(key for rank in self.ranks for batch in rank if not batch.filler for key in batch.keys)
