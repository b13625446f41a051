"""The samples of two ranks dealt anew between them, whatever the way: for those so few that swaps get stuck."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from asyncrl.trainers.swaps import Floats

MOST = 24
"""Samples of which every subset is looked at."""
NEAR = np.arange(-2, 2)


def subsets_near(costs: Floats, wanted: float, *, count: int) -> Iterator[NDArray[np.bool_]]:
    """Yield the `count` subsets, as masks, whose costs add up most nearly to what is wanted; at most `MOST` costs.

    Sums of one half's subsets are looked up among those of the other's (E. Horowitz, S. Sahni,
    "Computing partitions with applications to the knapsack problem", 1974).
    """
    half = len(costs) // 2
    low, high = subset_sums(costs[:half]), subset_sums(costs[half:])
    order = np.argsort(high, kind="stable")
    at = (np.searchsorted(high[order], wanted - low)[:, None] + NEAR).clip(0, len(high) - 1)
    miss = np.abs(low[:, None] + high[order][at] - wanted).ravel()
    nearest = np.argpartition(miss, min(4 * count, len(miss) - 1))[: 4 * count]
    nearest = nearest[np.lexsort((nearest, miss[nearest]))]
    seen: dict[int, None] = dict.fromkeys((nearest // len(NEAR) | order[at.ravel()[nearest]] << half).tolist())
    for bits in list(seen)[:count]:
        yield np.array([bits >> index & 1 for index in range(len(costs))], bool)


def subset_sums(costs: Floats) -> Floats:
    """Return the cost of each subset; bit i of its number says whether it has sample i."""
    sums = np.zeros(1)
    for cost in costs:
        sums = np.concatenate([sums, sums + cost])
    return sums
