"""A group's samples on one rank, where balance allows: its rows are read, and its prompt computed, once.

Groups are laid end to end and cut into as many parts of equal cost as there are ranks, so that at
most one group fewer than the ranks is split. They are dealt in rounds of like cost per token first:
parts of equal cost then hold nearly equal tokens as well, and pack into equally many micro-batches.
"""

import numpy as np

from asyncrl.trainers.dealing import deal, totals
from asyncrl.trainers.repartition import subset_sums
from asyncrl.trainers.swaps import Floats, Ints

TRIED = 10
"""Samples of a group that is cut of which every subset is tried."""


def deal_groups(groups: Ints, *, sizes: Ints, costs: Floats, ranks: int) -> Ints:
    """Return the rank of each sample; groups (numbers), sizes, costs: of each sample, in order of keys."""
    group, count = _by_first(groups)
    cost = totals(group, costs, hands=count)
    line = _line(cost, totals(group, sizes.astype(np.float64), hands=count), ranks)
    end = cost[line].cumsum()
    part = costs.sum() / ranks
    cuts = part * np.arange(1, ranks)
    first = np.zeros(count, np.int64)
    first[line] = np.searchsorted(cuts, end - cost[line], side="right")
    rank = first[group]
    by_group = np.argsort(group, kind="stable")
    ends = np.bincount(group).cumsum()
    cut = np.searchsorted(end, cuts).clip(max=len(line) - 1)
    for at in np.unique(cut).tolist():
        one = int(line[at])
        left = by_group[ends[one - 1] if one else 0 : ends[one]]
        before = float(end[at] - cost[one])
        for index in np.flatnonzero(cut == at).tolist():
            stay = _closest(costs[left], float(cuts[index]) - before)
            rank[left[stay]] = index
            before += float(costs[left[stay]].sum())
            left = left[~stay]
            rank[left] = index + 1
    return rank


def _by_first(groups: Ints) -> tuple[Ints, int]:
    """Number groups by their first samples, so that nothing depends on their names or their arrival."""
    first = np.full(int(groups.max()) + 1, len(groups))
    first[groups[::-1]] = np.arange(len(groups))[::-1]
    number = np.empty_like(first)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return number[groups], int((first < len(groups)).sum())


def _line(costs: Floats, sizes: Floats, ranks: int) -> Ints:
    """Return the order in which groups are laid: those dealt to one rank side by side."""
    ratio = np.argsort(-costs / np.maximum(sizes, 1), kind="stable")
    some = np.concatenate([costs[ratio], np.zeros(-len(costs) % ranks)])
    return ratio[np.argsort(deal(some, ranks=ranks, in_order=True)[: len(costs)], kind="stable")]


def _closest(costs: Floats, wanted: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Choose samples that cost nearly what is wanted: the first that fit, and the best subset of the next."""
    stay = np.zeros(len(costs), bool)
    taken = 0
    while len(costs) - taken > TRIED and costs[taken] <= wanted:
        wanted -= float(costs[taken])
        taken += 1
    stay[:taken] = True
    some = costs[taken : taken + TRIED]
    best = int(np.abs(subset_sums(some) - wanted).argmin())
    stay[taken : taken + len(some)] = [best >> bit & 1 for bit in range(len(some))]
    return stay
