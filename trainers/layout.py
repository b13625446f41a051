"""Ways to lay samples out: the bin (a micro-batch to be) of each sample, and the rank of each bin.

Invariant: no bin is over the capacity, and in lockstep every rank has equally many.
"""

import numpy as np

from asyncrl.trainers.dealing import (
    FEW,
    KICKED,
    SOME,
    attainable,
    deal,
    deal_samples,
    swap_bins,
    swap_freely,
    totals,
)
from asyncrl.trainers.locality import deal_groups
from asyncrl.trainers.packing import least_bins, pack, pack_apart, pack_in_order
from asyncrl.trainers.samples import Layout, Samples
from asyncrl.trainers.search import searched
from asyncrl.trainers.swaps import Ints

CLOSE_ENOUGH = 1e-4
"""More than some samples are not looked at further, if the heaviest rank is within this share of what is attainable."""


def in_lockstep(samples: Samples, *, ranks: int, capacity: int) -> Layout:
    """Pack into the fewest bins of a multiple of `ranks`, and even the ranks out."""
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    bins[longest_first], count = pack(samples.units[longest_first], capacity=capacity, multiple=ranks)
    costs = totals(bins, samples.costs, hands=count)
    costs[np.bincount(bins, minlength=count) == 0] = samples.costs[samples.shortest]
    rank = deal(costs, ranks=ranks)
    if count >= len(bins):
        return Layout(bins, swap_bins(rank, costs, ranks=ranks))
    layout = Layout(bins, rank).evened_out(samples, ranks=ranks, capacity=capacity)
    enough = attainable(samples.costs, ranks=ranks, each=count // ranks)
    if len(bins) > SOME:
        enough *= 1 + CLOSE_ENOUGH
    if layout.heaviest(samples) <= enough:
        return layout
    if len(bins) > FEW:
        layout = layout.bins_swapped(samples, ranks=ranks)
        return layout.evened_out(samples, ranks=ranks, capacity=capacity, kicked=KICKED // ranks)
    return searched(layout, samples, ranks=ranks, capacity=capacity, enough=enough)


def near_groups(
    samples: Samples, group: Ints, *, ranks: int, capacity: int, each: int, tolerance: float
) -> Layout | None:
    """Lay the samples of a group, onto one rank or two; None if `each` bins a rank do not hold them so."""
    owner = deal_groups(group, sizes=samples.units, costs=samples.costs, ranks=ranks)
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    some = pack_apart(samples.units[longest_first], owner[longest_first], hands=ranks, each=each, capacity=capacity)
    if some is None:
        return None
    bins[longest_first] = some
    layout = Layout(bins, np.repeat(np.arange(ranks), each))
    return layout.evened_out(samples, ranks=ranks, capacity=capacity, tolerance=tolerance)


def by_locality(samples: Samples, group: Ints, *, ranks: int, capacity: int, tolerance: float) -> Layout:
    """Keep groups together if it costs no more micro-batches, nor more balance than the tolerance; else do without."""
    each = -(-least_bins(samples.units[samples.longest_first], capacity=capacity) // ranks)
    mean = float(samples.costs.sum()) / ranks
    near = None
    if each * ranks < len(samples.units):
        near = near_groups(samples, group, ranks=ranks, capacity=capacity, each=each, tolerance=tolerance)
        if near is not None and near.heaviest(samples) <= mean * (1 + tolerance):
            return near
    apart = in_lockstep(samples, ranks=ranks, capacity=capacity)
    more = len(apart.ranks) // ranks
    if more > each and more * ranks < len(samples.units):
        near = near_groups(samples, group, ranks=ranks, capacity=capacity, each=more, tolerance=tolerance)
    if near is None or near.heaviest(samples) > max(mean * (1 + tolerance), apart.heaviest(samples)):
        return apart
    return near


def rank_by_rank(samples: Samples, *, ranks: int, capacity: int, tolerance: float) -> Layout:
    """Balance samples over ranks, whatever the micro-batches; then pack each rank's by themselves."""
    if samples.group is None:
        rank = swap_freely(deal_samples(samples.costs, ranks), samples.costs, hands=ranks)
    else:
        enough = float(samples.costs.sum()) / ranks * (1 + tolerance)
        rank = deal_groups(samples.group, sizes=samples.units, costs=samples.costs, ranks=ranks)
        rank = swap_freely(rank, samples.costs, hands=ranks, enough=enough)
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    of_bins: list[int] = []
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        if len(mine):
            some, count = pack(samples.units[mine], capacity=capacity, multiple=1)
            bins[mine] = some + len(of_bins)
            of_bins += [index] * count
    return Layout(bins, np.array(of_bins))


def in_order(samples: Samples, *, ranks: int, capacity: int, lockstep: bool) -> Layout:
    """Pack neighbours together, and give neighbouring bins to one rank."""
    bins, count = pack_in_order(samples.units, capacity=capacity, multiple=ranks if lockstep else 1)
    return Layout(bins, np.arange(count) * ranks // count)


def split_updates(samples: Samples, updates: int, *, balance: bool) -> list[Samples]:
    """Split the samples into optimizer updates of nearly equal numbers and, with `balance`, costs."""
    count = min(updates, len(samples.keys))
    if count < 2:
        return [samples]
    if not balance:
        return [samples.part(which) for which in np.array_split(np.arange(len(samples.keys)), count)]
    update = deal_samples(samples.costs, count, swaps=True)
    return [samples.part(np.flatnonzero(update == index)) for index in range(count)]
