"""The samples that are planned, and where they go."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.trainers.dealing import swap_bins, swap_samples, totals
from asyncrl.trainers.swaps import Floats, Ints, ascending


@dataclass(frozen=True, slots=True)
class Samples:
    """What one optimizer update plans, in order of keys.

    units: padded tokens over the alignment. group: each sample's group, by number; None if they do not matter.
    """

    keys: NDArray[np.object_]
    tokens: Ints
    units: Ints
    costs: Floats
    group: Ints | None = None

    def part(self, which: Ints) -> "Samples":
        group = None if self.group is None else self.group[which]
        return Samples(self.keys[which], self.tokens[which], self.units[which], self.costs[which], group)

    @property
    def longest_first(self) -> Ints:
        return ascending(self.units.max() - self.units)

    @property
    def shortest(self) -> int:
        """The last by key of the shortest: what fillers repeat."""
        return len(self.units) - 1 - int(self.units[::-1].argmin())


@dataclass(frozen=True, slots=True)
class Layout:
    """Each sample's bin and each bin's rank. A bin without a sample is a filler."""

    bins: Ints
    ranks: Ints

    def heaviest(self, samples: Samples) -> float:
        """Return what the costliest rank costs, fillers aside."""
        return float(totals(self.ranks[self.bins], samples.costs, hands=int(self.ranks.max()) + 1).max())

    def bins_swapped(self, samples: Samples, *, ranks: int) -> "Layout":
        """Swap whole bins between ranks, as long as that makes the heaviest lighter; full bins have no other swap."""
        costs = totals(self.bins, samples.costs, hands=len(self.ranks))
        return Layout(self.bins, swap_bins(self.ranks, costs, ranks=ranks))

    def evened_out(
        self, samples: Samples, *, ranks: int, capacity: int, kicked: int = 0, tolerance: float | None = None
    ) -> "Layout":
        """Swap samples until no rank can be lighter, or is over the mean by more than the tolerance; bins stay."""
        bins = swap_samples(
            self.bins,
            self.ranks,
            sizes=samples.units,
            costs=samples.costs,
            capacity=capacity,
            ranks=ranks,
            kicked=kicked,
            tolerance=tolerance,
        )
        return Layout(bins, self.ranks)
