"""The samples of one optimizer update, and a layout of them: the bin of each sample, the rank of each bin."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples that one optimizer update plans, in order of keys.

    sizes: padded tokens over the alignment. groups: each sample's group, by number; None if they do not matter. homes:
    the node of each sample's row, by number (nearness.py); None if it does not matter.
    """

    keys: NDArray[np.object_]
    tokens: Ints
    sizes: Ints
    costs: Floats
    groups: Ints | None = None
    homes: Ints | None = None

    def part(self, which: Ints) -> "Samples":
        """Return some of the samples, by position."""
        groups = None if self.groups is None else self.groups[which]
        homes = None if self.homes is None else self.homes[which]
        return Samples(self.keys[which], self.tokens[which], self.sizes[which], self.costs[which], groups, homes)

    @property
    def longest_first(self) -> Ints:
        """Positions by descending size, ties in order of keys."""
        return stable_order(self.sizes.max() - self.sizes)

    @property
    def shortest(self) -> int:
        """The sample that fillers repeat: the shortest, and of several the last by key."""
        return len(self.sizes) - 1 - int(self.sizes[::-1].argmin())


@dataclass(frozen=True, slots=True)
class Layout:
    """Each sample's bin and each bin's rank. A bin without a sample becomes a filler.

    Invariant: no bin is over the capacity; in lockstep every rank has equally many bins.
    """

    bins: Ints
    ranks: Ints

    def max_load(self, samples: Samples) -> float:
        """Return the cost of the heaviest rank, fillers aside."""
        return float(loads_of(self.ranks[self.bins], samples.costs, count=int(self.ranks.max()) + 1).max())


def loads_of(owners: Ints, costs: Floats, *, count: int) -> Floats:
    """Return the total cost of each of `count` owners (bins, ranks or groups)."""
    return np.bincount(owners, weights=costs, minlength=count).astype(np.float64)


def stable_order(numbers: Ints) -> Ints:
    """Return the positions that sort numbers (at least 0) in ascending order; equal ones keep their order."""
    # numpy sorts 16 bits by radix, which is several times as fast as its sort of 64.
    return np.argsort(numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers, kind="stable")
