"""Bin packing: samples into as few micro-batches as possible, none over the capacity, none empty.

Pure functions over sizes in descending order; the numbers of bins have no order. Worst fit decreasing
levels the bins and so leaves every one a little room; best fit decreasing leaves few bins much room and so packs to
within tokens of the capacity (D. S. Johnson, "Near-optimal bin packing algorithms", 1973). Levelled bins are tried
first, because equal bins compute in equal time. If no fit packs, swaps and subset sums are tried.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from asyncrl.trainers.planning.limits import (
    LEVELLED_SHARES,
    MIN_REPACKED_BINS,
    REPACKED_SHARE,
    SWAPPED_FIT_SAMPLES,
)
from asyncrl.trainers.planning.local_search import swap_freely
from asyncrl.trainers.planning.samples import Ints, stable_order
from asyncrl.trainers.planning.subset_sums import fill_bins


def lower_bound(sizes: Ints, *, capacity: int) -> int:
    """Return a number of bins that no packing is below, at least 1; `sizes` descend.

    S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing problem", 1990, bound L2: for
    every size up to half the capacity, what is larger than half has a bin of its own, and samples of that size or
    more fill the room beside them first. Example: 6, 6, 6, 5, 5 in bins of 10 need four, though 28 tokens fit three.
    """
    total = np.concatenate([[0], sizes.cumsum()])
    halves = int(np.searchsorted(-sizes, -(capacity // 2), side="left"))
    upto = np.arange(halves, len(sizes) + 1)
    floor = sizes[upto[1:] - 1] if len(upto) > 1 else sizes[:0]
    alone = np.searchsorted(-sizes, -(capacity - floor), side="left").clip(max=halves)
    beside = (halves - alone) * capacity - (total[halves] - total[alone])
    rest = total[upto[1:]] - total[halves] - beside
    more = -(-rest // capacity)
    return max(1, halves, -(-int(total[-1]) // capacity), int((halves + more.clip(min=0)).max(initial=0)))


def pack(sizes: Ints, *, capacity: int, multiple: int) -> tuple[Ints, int]:
    """Return each sample's bin and the number of bins: the smallest multiple of `multiple` found to work.

    `sizes` descend and none is over `capacity`. No bin is empty unless there are more bins than samples.
    """
    count = multiple * -(-lower_bound(sizes, capacity=capacity) // multiple)
    while (bins := pack_into(sizes, count, capacity=capacity)) is None:
        count += multiple
    return bins, count


def pack_into(sizes: Ints, count: int, *, capacity: int) -> Ints | None:
    """Return each sample's bin of `count` bins, or None if no way was found; `sizes` descend."""
    if int(sizes.sum()) > count * capacity:
        return None
    bins = fit_into(sizes, count, capacity=capacity)
    if bins is not None:
        return bins
    if len(sizes) <= SWAPPED_FIT_SAMPLES:
        bins = swap_freely(_worst_fit(sizes, count)[0], sizes.astype(np.float64), count=count, enough=capacity)
        if np.bincount(bins, weights=sizes).max() <= capacity:
            return bins
    bins = fill_bins(sizes.tolist(), count, capacity=capacity)
    return None if (bins < 0).any() else _fill_empty(bins, count)


def fit_into(sizes: Ints, count: int, *, capacity: int) -> Ints | None:
    """Return each sample's bin by worst fit and best fit, which are fast; None if a sample is left over."""
    if len(sizes) <= count:
        return np.arange(len(sizes))
    for share in LEVELLED_SHARES:
        bins = _fit(sizes, count, capacity=capacity, levelled=round(share * len(sizes)))
        if bins is not None:
            bins = _repack(sizes, bins, count, capacity=capacity)
            if not (bins < 0).any():
                return _fill_empty(bins, count)
    return None


def pack_by_owner(sizes: Ints, owners: Ints, *, ranks: int, per_rank: int, capacity: int) -> Ints | None:
    """Return each sample's bin of `ranks * per_rank`, or None if no way was found; `sizes` descend.

    Samples of one owner go to its own bins; the few, and small, that do not fit there go where there is room.
    """
    by_owner = stable_order(owners)
    parts = np.split(by_owner, np.bincount(owners, minlength=ranks).cumsum()[:-1])
    for share in (*LEVELLED_SHARES, None):
        bins = np.full(len(sizes), -1)
        for rank, mine in enumerate(parts):
            own = sizes[mine]
            packed = (
                fill_bins(own.tolist(), per_rank, capacity=capacity)
                if share is None
                else _fit(own, per_rank, capacity=capacity, levelled=round(share * len(own)))
            )
            if packed is None:
                break
            bins[mine] = np.where(packed < 0, packed, packed + rank * per_rank)
        else:
            left = bins < 0
            load = np.bincount(bins[~left], weights=sizes[~left], minlength=ranks * per_rank).astype(np.int64)
            bins[left] = _best_fit(sizes[left].tolist(), (capacity - load).tolist())
            bins = _repack(sizes, bins, ranks * per_rank, capacity=capacity)
            if not (bins < 0).any():
                return _fill_empty(bins, ranks * per_rank)
    return None


def next_fit(sizes: Ints, *, capacity: int, multiple: int) -> tuple[Ints, int]:
    """Pack neighbours together, in the given order (next fit); then halve bins up to a multiple."""
    starts = [0]
    load = 0
    for at, size in enumerate(sizes.tolist()):
        if load + size > capacity:
            starts.append(at)
            load = 0
        load += size
    count = multiple * -(-len(starts) // multiple)
    while len(starts) < min(count, len(sizes)):
        ends = [*starts[1:], len(sizes)]
        most, start = max((end - start, -start) for start, end in zip(starts, ends, strict=True))
        insort(starts, -start + most // 2)
    ends = [*starts[1:], len(sizes)]
    return np.repeat(np.arange(len(starts)), np.subtract(ends, starts)), count


def _repack(sizes: Ints, bins: Ints, count: int, *, capacity: int) -> Ints:
    """Pack the emptiest bins and the samples without a bin again: their free room is of use only together."""
    if not (bins < 0).any():
        return bins
    loads = np.bincount(bins[bins >= 0], weights=sizes[bins >= 0], minlength=count)
    emptiest = np.argsort(loads, kind="stable")[: max(MIN_REPACKED_BINS, int(count * REPACKED_SHARE))]
    which = np.flatnonzero((bins < 0) | np.isin(bins, emptiest))
    if int(sizes[which].sum()) > len(emptiest) * capacity:
        return bins
    filled = fill_bins(sizes[which].tolist(), len(emptiest), capacity=capacity)
    bins = bins.copy()
    bins[which] = np.where(filled < 0, filled, emptiest[filled])
    return bins


def _fit(sizes: Ints, count: int, *, capacity: int, levelled: int) -> Ints | None:
    """Return each sample's bin, -1 where it fits in none; None if levelling went over the capacity."""
    large = max(levelled, count) if levelled else 0
    bins, loads = _worst_fit(sizes[:large], count)
    if loads.max() > capacity:
        return None
    return np.concatenate([bins, _best_fit(sizes[large:].tolist(), (capacity - loads).tolist())])


def _worst_fit(sizes: Ints, count: int) -> tuple[Ints, Ints]:
    """Give each size, in order, to the emptiest bin, whatever the capacity; return bins and loads."""
    bins = np.zeros(len(sizes), np.int64)
    loads = np.zeros(count, np.int64)
    at = 0
    while at < len(sizes):
        emptiest = np.argsort(loads, kind="stable")[: len(sizes) - at]
        before = loads[emptiest]
        after = before + sizes[at : at + len(emptiest)]
        # All at once, up to the point where a bin that was just filled would be the emptiest again.
        again = np.minimum.accumulate(after[:-1]) < before[1:]
        taken = int(again.argmax()) + 1 if again.any() else len(emptiest)
        bins[at : at + taken] = emptiest[:taken]
        loads[emptiest[:taken]] = after[:taken]
        at += taken
    return bins, loads


def _best_fit(sizes: Sequence[int], room: Sequence[int]) -> Ints:
    """Give each size to a bin with the least room that holds it; -1 if it fits nowhere.

    Bins of equal room form a stack: `newest` has its top by room, `below` the bin under each bin.
    """
    newest, below = [-1] * (max(room, default=0) + 1), [-1] * len(room)
    for index in reversed(range(len(room))):
        below[index], newest[room[index]] = newest[room[index]], index
    rooms = sorted(set(room))
    chosen = []
    for size in sizes:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            chosen.append(-1)
            continue
        had = rooms[at]
        index = newest[had]
        chosen.append(index)
        newest[had] = below[index]
        if newest[had] < 0:
            del rooms[at]
        left = had - size
        if newest[left] < 0:
            insort(rooms, left)
        below[index] = newest[left]
        newest[left] = index
    return np.array(chosen, np.int64)


def _fill_empty(bins: Ints, count: int) -> Ints:
    """Move one sample into each empty bin, the smallest of the fullest (by number) first."""
    members = np.bincount(bins, minlength=count)
    for empty in np.flatnonzero(members == 0).tolist():
        fullest = int(members.argmax())
        bins[np.flatnonzero(bins == fullest)[-1]] = empty
        members[fullest] -= 1
        members[empty] = 1
    return bins
