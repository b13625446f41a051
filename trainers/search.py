"""For few samples: other ways to balance them, which cost too much for many."""

from collections.abc import Iterator
from random import Random

import numpy as np

from asyncrl.trainers.dealing import KICKED, deal_samples, swap_freely, totals
from asyncrl.trainers.differencing import deal_by_differences
from asyncrl.trainers.packing import pack_simply
from asyncrl.trainers.repartition import MOST, subsets_near
from asyncrl.trainers.samples import Layout, Samples
from asyncrl.trainers.swaps import GAIN, Ints

WAYS, SHUFFLED = 16, 4
"""Ways to balance first, for two ranks; swaps of samples from way to way."""
DEALS, SUBSETS = 160, 32
"""Deals that are tried, in all and of the samples of one pair of ranks, the most even first."""


def searched(layout: Layout, samples: Samples, *, ranks: int, capacity: int, enough: float) -> Layout:
    """Look further, in ways that cost too much for many samples, until no rank costs more than `enough`."""
    other = balanced_first(samples, ranks=ranks, capacity=capacity, each=len(layout.ranks) // ranks, enough=enough)
    found = [layout] if other is None else [layout, other]
    if min(some.heaviest(samples) for some in found) > enough:
        found = [dealt_anew(some, samples, ranks=ranks, capacity=capacity, enough=enough) for some in found]
    layout = min(found, key=lambda some: some.heaviest(samples))
    if layout.heaviest(samples) <= enough:
        return layout
    return layout.evened_out(samples, ranks=ranks, capacity=capacity, kicked=KICKED // ranks)


def balanced_first(samples: Samples, *, ranks: int, capacity: int, each: int, enough: float) -> Layout | None:
    """Balance samples over ranks and then pack each rank's into `each` micro-batches; None if that never fits."""
    best: tuple[float, Layout] | None = None
    for rank in _ways(samples, ranks):
        heaviest = float(totals(rank, samples.costs, hands=ranks).max())
        bins = _packed_by_rank(samples, rank, ranks=ranks, capacity=capacity, each=each)
        if bins is not None and (best is None or heaviest < best[0]):
            best = heaviest, Layout(bins, np.repeat(np.arange(ranks), each))
        if best is not None and best[0] <= enough:
            break
    return None if best is None else best[1]


def _ways(samples: Samples, ranks: int) -> Iterator[Ints]:
    """Yield deals of the samples to ranks without regard to room: by differences, and longest first with swaps."""
    dealt = deal_by_differences(samples.costs, ranks=ranks)
    yield dealt
    yield swap_freely(dealt, samples.costs, hands=ranks)
    dealt = deal_samples(samples.costs, ranks)
    random = Random(0)  # Its `random` alone is the same in every version, as a replayed plan must be.
    for _ in range(max(2, 4 * WAYS // ranks**2)):
        yield swap_freely(dealt, samples.costs, hands=ranks)
        for _ in range(SHUFFLED):
            one, other = (int(random.random() * len(dealt)) for _ in range(2))
            dealt[[one, other]] = dealt[[other, one]]


def _packed_by_rank(samples: Samples, rank: Ints, *, ranks: int, capacity: int, each: int) -> Ints | None:
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        some = pack_simply(samples.units[mine], each, capacity=capacity) if len(mine) >= each else None
        if some is None:
            return None
        bins[mine] = some + index * each
    return bins


def dealt_anew(layout: Layout, samples: Samples, *, ranks: int, capacity: int, enough: float) -> Layout:
    """Deal and pack the samples of two ranks anew, of the heaviest and another, as long as that gains something."""
    each = len(layout.ranks) // ranks
    place = np.argsort(layout.ranks, kind="stable")
    bins, rank = layout.bins.copy(), layout.ranks[layout.bins]
    loads = totals(rank, samples.costs, hands=ranks)
    left = DEALS
    lightest = 0
    while left > 0 and lightest < ranks - 1 and loads.max() > enough:
        left -= 1
        order = np.argsort(loads, kind="stable")
        heavy, light = int(order[-1]), int(order[lightest])
        lightest += 1
        both = np.flatnonzero((rank == heavy) | (rank == light))
        both = both[np.argsort(-samples.units[both], kind="stable")]
        if len(both) > MOST:
            continue
        costs, half = samples.costs[both], (loads[heavy] + loads[light]) / 2
        for mask in subsets_near(costs, half, count=SUBSETS):
            sums = float(costs[mask].sum()), float(costs[~mask].sum())
            if max(sums) >= loads[heavy] * (1 - GAIN):
                break
            left -= 1
            one, other = both[mask], both[~mask]
            if min(len(one), len(other)) < each:
                continue
            of_one = pack_simply(samples.units[one], each, capacity=capacity)
            of_other = pack_simply(samples.units[other], each, capacity=capacity)
            if of_one is not None and of_other is not None:
                bins[one], bins[other] = place[of_one + heavy * each], place[of_other + light * each]
                rank[one], rank[other] = heavy, light
                loads[[heavy, light]] = sums
                lightest = 0
                break
    return Layout(bins, layout.ranks)
