"""The ways to lay samples out, one per kind of plan: in lockstep, by locality, rank by rank, in order."""

import numpy as np

from asyncrl.trainers.planning.bin_packing import fit_into, lower_bound, next_fit, pack, pack_by_owner
from asyncrl.trainers.planning.group_locality import assign_groups
from asyncrl.trainers.planning.karmarkar_karp import assign_by_differences
from asyncrl.trainers.planning.limits import BALANCED_FIRST_SAMPLES
from asyncrl.trainers.planning.local_search import swap_bins, swap_freely, swap_samples, target_load
from asyncrl.trainers.planning.longest_first import assign
from asyncrl.trainers.planning.samples import Ints, Layout, Samples, loads_of


def in_lockstep(samples: Samples, *, ranks: int, capacity: int) -> Layout:
    """Pack into the fewest bins of a multiple of `ranks`, assign those longest first, and swap until even."""
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    bins[longest_first], count = pack(samples.sizes[longest_first], capacity=capacity, multiple=ranks)
    costs = loads_of(bins, samples.costs, count=count)
    costs[np.bincount(bins, minlength=count) == 0] = samples.costs[samples.shortest]
    rank = assign(costs, ranks=ranks)
    if count >= len(bins):  # Every bin has at most one sample: bins are all there is to swap.
        return Layout(bins, swap_bins(rank, costs, ranks=ranks))
    layout = swap_samples(Layout(bins, rank), samples, ranks=ranks, capacity=capacity)
    load, per_rank = layout.max_load(samples), count // ranks
    if len(bins) <= BALANCED_FIRST_SAMPLES and load > target_load(samples.costs, ranks=ranks, per_rank=per_rank):
        other = balanced_first(samples, ranks=ranks, capacity=capacity, per_rank=per_rank)
        if other is not None and other.max_load(samples) < load:
            return other
    return layout


def balanced_first(samples: Samples, *, ranks: int, capacity: int, per_rank: int) -> Layout | None:
    """Balance samples over ranks, and then pack each rank's into `per_rank` bins; None if they do not fit."""
    rank = assign_by_differences(samples.costs, ranks=ranks)
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        packed = fit_into(samples.sizes[mine], per_rank, capacity=capacity) if len(mine) >= per_rank else None
        if packed is None:
            return None
        bins[mine] = packed + index * per_rank
    layout = Layout(bins, np.repeat(np.arange(ranks), per_rank))
    return swap_samples(layout, samples, ranks=ranks, capacity=capacity)


def by_locality(
    samples: Samples, groups: Ints, *, ranks: int, capacity: int, tolerance: float, seats: Ints | None = None
) -> Layout:
    """Keep groups together if it costs no more micro-batches, nor more balance than the tolerance; else do without."""
    per_rank = -(-lower_bound(samples.sizes[samples.longest_first], capacity=capacity) // ranks)
    mean = float(samples.costs.sum()) / ranks

    def together(per_rank: int) -> Layout | None:
        owners = assign_groups(samples, groups, ranks=ranks, seats=seats)
        return _pack_owned(samples, owners, ranks=ranks, capacity=capacity, per_rank=per_rank, tolerance=tolerance)

    near = together(per_rank) if per_rank * ranks < len(samples.sizes) else None
    if near is not None and near.max_load(samples) <= mean * (1 + tolerance):
        return near
    apart = in_lockstep(samples, ranks=ranks, capacity=capacity)
    more = len(apart.ranks) // ranks
    if more > per_rank and more * ranks < len(samples.sizes):
        near = together(more)
    if near is None or near.max_load(samples) > max(mean * (1 + tolerance), apart.max_load(samples)):
        return apart
    return near


def rank_by_rank(samples: Samples, *, ranks: int, capacity: int, tolerance: float, seats: Ints | None = None) -> Layout:
    """Balance samples over ranks, whatever the micro-batches; then pack each rank's by themselves."""
    if samples.groups is None:
        rank = swap_freely(assign(samples.costs, ranks=ranks), samples.costs, count=ranks)
    else:
        enough = float(samples.costs.sum()) / ranks * (1 + tolerance)
        rank = assign_groups(samples, samples.groups, ranks=ranks, seats=seats)
        rank = swap_freely(rank, samples.costs, count=ranks, enough=enough)
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    rank_of_bin: list[int] = []
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        if len(mine):
            packed, count = pack(samples.sizes[mine], capacity=capacity, multiple=1)
            bins[mine] = packed + len(rank_of_bin)
            rank_of_bin += [index] * count
    return Layout(bins, np.array(rank_of_bin))


def in_order(samples: Samples, *, ranks: int, capacity: int, lockstep: bool) -> Layout:
    """Pack neighbours together, and give neighbouring bins to one rank."""
    bins, count = next_fit(samples.sizes, capacity=capacity, multiple=ranks if lockstep else 1)
    return Layout(bins, np.arange(count) * ranks // count)


def split_updates(samples: Samples, updates: int, *, balance: bool) -> list[Samples]:
    """Split the samples into optimizer updates of nearly equal numbers and, with `balance`, costs."""
    count = min(updates, len(samples.keys))
    if count < 2:
        return [samples]
    if not balance:
        return [samples.part(which) for which in np.array_split(np.arange(len(samples.keys)), count)]
    padded = np.concatenate([samples.costs, np.zeros(-len(samples.costs) % count)])
    update = swap_bins(assign(padded, ranks=count), padded, ranks=count)[: len(samples.costs)]
    return [samples.part(np.flatnonzero(update == index)) for index in range(count)]


def _pack_owned(
    samples: Samples, owners: Ints, *, ranks: int, capacity: int, per_rank: int, tolerance: float
) -> Layout | None:
    """Pack each rank's samples into bins of its own; None if `per_rank` bins per rank do not hold them so."""
    longest_first = samples.longest_first
    bins = np.empty_like(longest_first)
    packed = pack_by_owner(
        samples.sizes[longest_first], owners[longest_first], ranks=ranks, per_rank=per_rank, capacity=capacity
    )
    if packed is None:
        return None
    bins[longest_first] = packed
    layout = Layout(bins, np.repeat(np.arange(ranks), per_rank))
    return swap_samples(layout, samples, ranks=ranks, capacity=capacity, tolerance=tolerance)
