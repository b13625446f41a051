"""Samples into micro-batches: as few bins as hold them, none over the capacity.

Pure functions over arrays of sizes in descending order; a bin's number says nothing but "together".
Worst fit decreasing levels the bins and so leaves every one a little room; best fit decreasing
leaves few bins much room and so packs to within tokens of the capacity (D. S. Johnson, "Near-optimal
bin packing algorithms", 1973). The first is tried first, since equal bins compute in equal time.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from asyncrl.trainers.dealing import Ints, swap_freely

FEW = 2048
"""As many samples, or fewer, are swapped between bins where no fit works."""
KICKS = 64
"""A micro-batch more costs every rank more than the search."""
LEVELLED = (1.0, 0.6, 0.3, 0.0)
"""Shares of the samples, from the largest, that worst fit places before best fit places the rest."""


def pack(sizes: Ints, *, capacity: int, multiple: int) -> tuple[Ints, int]:
    """Return each sample's bin and the number of bins: the smallest multiple of `multiple` found to work.

    `sizes` descend and none is over `capacity`. No bin is empty unless there are more bins than samples.
    """
    least = -(-int(sizes.sum()) // capacity)
    count = multiple * max(1, -(-least // multiple))
    while (bins := pack_into(sizes, count, capacity=capacity)) is None:
        count += multiple
    return bins, count


def pack_into(sizes: Ints, count: int, *, capacity: int) -> Ints | None:
    """Return each sample's bin of `count` bins, or None if no way was found; `sizes` descend."""
    for share in LEVELLED:
        bins = _fit(sizes, count, capacity=capacity, levelled=round(share * len(sizes)))
        if bins is not None:
            return bins
    if len(sizes) > FEW or int(sizes.sum()) > count * capacity:
        return None
    bins = swap_freely(_level(sizes, count)[0], sizes.astype(np.float64), hands=count, enough=capacity, kicks=KICKS)
    return bins if np.bincount(bins, weights=sizes).max() <= capacity else None


def pack_in_order(sizes: Ints, *, capacity: int, multiple: int) -> tuple[Ints, int]:
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


def _fit(sizes: Ints, count: int, *, capacity: int, levelled: int) -> Ints | None:
    if len(sizes) <= count:
        return np.arange(len(sizes))
    large = max(levelled, count) if levelled else 0
    bins, loads = _level(sizes[:large], count)
    if loads.max() > capacity:
        return None
    rest = _best_fit(sizes[large:].tolist(), (capacity - loads).tolist())
    if rest is None:
        return None
    return _fill_empty(np.concatenate([bins, np.array(rest, np.int64)]), count)


def _level(sizes: Ints, count: int) -> tuple[Ints, Ints]:
    """Give each size, in order, to the emptiest bin; many at a time, while none of them could be next again."""
    bins = np.zeros(len(sizes), np.int64)
    loads = np.zeros(count, np.int64)
    at = 0
    while at < len(sizes):
        emptiest = np.argsort(loads, kind="stable")[: len(sizes) - at]
        before = loads[emptiest]
        after = before + sizes[at : at + len(emptiest)]
        again = np.minimum.accumulate(after[:-1]) < before[1:]
        taken = int(again.argmax()) + 1 if again.any() else len(emptiest)
        bins[at : at + taken] = emptiest[:taken]
        loads[emptiest[:taken]] = after[:taken]
        at += taken
    return bins, loads


def _best_fit(sizes: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """Give each size to a bin with the least room that holds it; None if one fits nowhere."""
    bins_with: defaultdict[int, list[int]] = defaultdict(list)
    for index in reversed(range(len(room))):
        bins_with[room[index]].append(index)
    rooms = sorted(bins_with)
    chosen = []
    for size in sizes:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            return None
        before = rooms[at]
        same = bins_with[before]
        index = same.pop()
        chosen.append(index)
        if not same:
            del rooms[at]
        left = bins_with[before - size]
        if not left:
            insort(rooms, before - size)
        left.append(index)
    return chosen


def _fill_empty(bins: Ints, count: int) -> Ints:
    """Move one sample into each empty bin, the smallest of the fullest (by number) first."""
    members = np.bincount(bins, minlength=count)
    for empty in np.flatnonzero(members == 0).tolist():
        fullest = int(members.argmax())
        bins[np.flatnonzero(bins == fullest)[-1]] = empty
        members[fullest] -= 1
        members[empty] = 1
    return bins
