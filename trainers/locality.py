"""A group's samples on one rank, where balance allows: its rows are read, and its prompt computed, once.

Swaps samples between a rank that has some of a group and the rank that has most of it. Never moves
a sample away from its group's home, so that no swap makes the number of readers grow.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEAR = 8
"""Samples of like size, of each rank, that a sample is tried against."""


def gather_groups(
    bins: Ints,
    ranks: Ints,
    groups: Sequence[str],
    *,
    sizes: Ints,
    costs: Floats,
    capacity: int,
    tolerance: float,
) -> Ints:
    """Return the bins of samples after swaps that bring groups together.

    bins, groups, sizes, costs: of each sample, in order of keys. ranks: of each bin. No swap puts a bin
    over `capacity`, nor a rank over both `tolerance` above the mean cost and the heaviest rank's.
    """
    rank_of, at = ranks.tolist(), bins.tolist()
    size, cost = sizes.tolist(), costs.tolist()
    room = (capacity - np.bincount(bins, weights=sizes, minlength=len(rank_of))).astype(np.int64).tolist()
    loads = np.bincount(ranks[bins], weights=costs, minlength=int(ranks.max()) + 1)
    most = max(float(loads.max()), float(loads.mean()) * (1 + tolerance))
    load = loads.tolist()
    home = _homes([rank_of[index] for index in at], groups, len(load))
    strangers: list[list[tuple[int, int]]] = [[] for _ in load]
    for index, group in enumerate(groups):
        if home[group] != rank_of[at[index]]:
            insort(strangers[rank_of[at[index]]], (size[index], index))

    def fits(x: int, y: int) -> bool:
        grows, dearer = size[x] - size[y], cost[x] - cost[y]
        fit_bins = grows <= room[at[y]] and -grows <= room[at[x]]
        return bool(fit_bins and load[rank_of[at[x]]] - dearer <= most and load[rank_of[at[y]]] + dearer <= most)

    for x in sorted(range(len(at)), key=lambda index: (groups[index], index)):
        here, there = rank_of[at[x]], home[groups[x]]
        if here == there:
            continue
        around = bisect_left(strangers[there], (size[x], x))
        near = strangers[there][max(0, around - NEAR) : around + NEAR]
        partners = [y for _, y in near if fits(x, y)]
        if not partners:
            continue
        y = min(partners, key=lambda other: (home[groups[other]] != here, abs(size[other] - size[x]), other))
        for rank, index in ((here, x), (there, y)):
            del strangers[rank][bisect_left(strangers[rank], (size[index], index))]
        if home[groups[y]] != here:
            insort(strangers[here], (size[y], y))
        room[at[x]] += size[x] - size[y]
        room[at[y]] -= size[x] - size[y]
        load[here] -= cost[x] - cost[y]
        load[there] += cost[x] - cost[y]
        at[x], at[y] = at[y], at[x]
    return np.array(at)


def _homes(ranks: Sequence[int], groups: Sequence[str], count: int) -> dict[str, int]:
    """Choose each group's rank: where most of it is, while that rank is no home to more than its share."""
    left = [-(-len(groups) // count)] * count
    members = Counter(groups)
    home: dict[str, int] = {}
    some = Counter(zip(groups, ranks, strict=True))
    for group, rank in sorted(some, key=lambda pair: (-some[pair], pair)):
        if group not in home and left[rank] >= some[group, rank]:
            home[group] = rank
            left[rank] -= members[group]
    for group, rank in sorted(some):
        home.setdefault(group, rank)
    return home
