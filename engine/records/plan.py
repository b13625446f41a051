"""The driver's packing: for each data-parallel rank, an equal number of micro-batches of keys."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Keys that go through the model together, and their tokens.

    A filler runs forward and backward like any other, on a row of the batch, with weight zero:
    it keeps collectives in step and adds nothing to loss, counts or metrics. `cost` is the
    planner's prediction, in the units of its cost function.
    """

    keys: tuple[str, ...]
    tokens: int
    filler: bool = False
    cost: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-batches by rank. Invariant: in `lockstep`, every rank has the same number of them.

    A forward-only plan may do without lockstep. `updates` says how many of every rank's micro-batches,
    in order, make up each optimizer update; empty: all of them are one.
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
        """The plan of each optimizer update by itself; a plan without `updates` is its own only part."""
        if not self.updates:
            return (self,)
        ends = list(accumulate(self.updates, initial=0))
        return tuple(Plan(tuple(rank[start:end] for rank in self.ranks)) for start, end in pairwise(ends))

    @property
    def keys(self) -> frozenset[str]:
        """All planned keys; a filler's key is the key of a real sample as well."""
        return frozenset(key for rank in self.ranks for batch in rank if not batch.filler for key in batch.keys)
