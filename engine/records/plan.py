"""The driver's packing: for each data-parallel rank, an equal number of micro-batches of keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Keys that go through the model together, and their tokens.

    A filler runs forward and backward like any other, on a row of the batch, with weight zero:
    it keeps collectives in step and adds nothing to loss, counts or metrics.
    """

    keys: tuple[str, ...]
    tokens: int
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-batches by rank. Invariant: every rank has the same number of them."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    def __post_init__(self) -> None:
        counts = {len(rank) for rank in self.ranks}
        if len(counts) > 1:
            raise ValueError(f"ranks differ in micro-batches: {[len(rank) for rank in self.ranks]}")

    @property
    def keys(self) -> frozenset[str]:
        """All planned keys; a filler's key is the key of a real sample as well."""
        return frozenset(key for rank in self.ranks for batch in rank if not batch.filler for key in batch.keys)
