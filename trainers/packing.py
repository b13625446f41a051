"""Samples into micro-batches: as few bins as hold them, none over the capacity.

Pure functions over arrays of sizes in descending order; a bin's number says nothing but "together".
Worst fit decreasing levels the bins and so leaves every one a little room; best fit decreasing
leaves few bins much room and so packs to within tokens of the capacity (D. S. Johnson, "Near-optimal
bin packing algorithms", 1973). The first is tried first, since equal bins compute in equal time.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from asyncrl.trainers.dealing import swap_freely
from asyncrl.trainers.differencing import deal_by_differences
from asyncrl.trainers.swaps import Ints, ascending

FEW = 2048
"""As many samples, or fewer, are swapped between bins where no fit works."""
FEW_DIFFERENCES = 2**16
"""Samples times bins up to which differences are tried as well."""
CANDIDATES = 64
"""Samples, from the largest that fits to the smallest, among which those that fill a bin are chosen."""
REFILLED, LEAST_REFILLED = 16, 4
"""One of so many bins is filled anew where samples are left over, the roomiest, and at least so many."""
LEVELLED = (1.0, 0.6, 0.3, 0.0)
"""Shares of the samples, from the largest, that worst fit places before best fit places the rest."""


def pack(sizes: Ints, *, capacity: int, multiple: int) -> tuple[Ints, int]:
    """Return each sample's bin and the number of bins: the smallest multiple of `multiple` found to work.

    `sizes` descend and none is over `capacity`. No bin is empty unless there are more bins than samples.
    """
    count = multiple * -(-least_bins(sizes, capacity=capacity) // multiple)
    while (bins := pack_into(sizes, count, capacity=capacity)) is None:
        count += multiple
    return bins, count


def least_bins(sizes: Ints, *, capacity: int) -> int:
    """Return a number of bins that no packing is below, at least 1; `sizes` descend.

    For every size up to half the capacity: what is larger than half has a bin of its own, and those
    of that size or more that are not fill what room is left beside them (S. Martello, P. Toth,
    "Lower bounds and reduction procedures for the bin packing problem", 1990, bound L2).
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


def pack_into(sizes: Ints, count: int, *, capacity: int) -> Ints | None:
    """Return each sample's bin of `count` bins, or None if no way was found; `sizes` descend."""
    bins = pack_simply(sizes, count, capacity=capacity)
    if bins is not None or int(sizes.sum()) > count * capacity:
        return bins
    costs = sizes.astype(np.float64)
    if len(sizes) <= FEW:
        bins = swap_freely(_level(sizes, count)[0], costs, hands=count, enough=capacity)
        if np.bincount(bins, weights=sizes).max() <= capacity:
            return bins
    if len(sizes) * count <= FEW_DIFFERENCES:
        bins = deal_by_differences(costs, ranks=count)
        if np.bincount(bins, weights=sizes).max() <= capacity:
            return _fill_empty(bins, count)
    bins = _fill(sizes.tolist(), count, capacity=capacity)
    return None if (bins < 0).any() else _fill_empty(bins, count)


def pack_simply(sizes: Ints, count: int, *, capacity: int) -> Ints | None:
    """Return what worst or best fit make of it, None if nothing."""
    if len(sizes) <= count:
        return np.arange(len(sizes))
    for share in LEVELLED:
        bins = _fit(sizes, count, capacity=capacity, levelled=round(share * len(sizes)))
        if bins is not None:
            bins = _refill(sizes, bins, count, capacity=capacity)
            if not (bins < 0).any():
                return _fill_empty(bins, count)
    return None


def _fill(sizes: Sequence[int], count: int, *, capacity: int) -> Ints:
    """Fill a bin after another: the largest sample left, and the samples that fill the rest of it best; -1: none.

    The sums that samples have are the bits of one number (S. Martello, P. Toth, "Knapsack Problems", 1990,
    section 4.2; J. N. D. Gupta, J. C. Ho, "A new heuristic algorithm for the one-dimensional bin-packing
    problem", 1999, fill bins so).
    """
    bins = np.full(len(sizes), -1)
    left = list(range(len(sizes)))
    for number in range(count):
        if not left:
            break
        first = left[0]
        room = capacity - sizes[first]
        reached, sums = 1, [1]
        mask = (2 << room) - 1
        fits = bisect_left(left, -room, lo=1, key=lambda index: -sizes[index])
        places = range(fits, len(left), max(1, (len(left) - fits) // CANDIDATES))
        for place in places:
            reached |= reached << sizes[left[place]] & mask
            sums.append(reached)
            if reached >> room:
                break
        wanted = reached.bit_length() - 1
        bins[first] = number
        gone = [0]
        for before, place in reversed(list(zip(sums[:-1], places, strict=False))):
            if not before >> wanted & 1:
                wanted -= sizes[left[place]]
                bins[left[place]] = number
                gone.append(place)
        for place in sorted(gone, reverse=True):
            del left[place]
    return bins


def _refill(sizes: Ints, bins: Ints, count: int, *, capacity: int) -> Ints:
    """Fill the roomiest bins anew, with their own samples and those in none: together their rooms are of use."""
    if not (bins < 0).any():
        return bins
    loads = np.bincount(bins[bins >= 0], weights=sizes[bins >= 0], minlength=count)
    roomiest = np.argsort(loads, kind="stable")[: max(LEAST_REFILLED, count // REFILLED)]
    which = np.flatnonzero((bins < 0) | np.isin(bins, roomiest))
    if int(sizes[which].sum()) > len(roomiest) * capacity:
        return bins
    filled = _fill(sizes[which].tolist(), len(roomiest), capacity=capacity)
    bins = bins.copy()
    bins[which] = np.where(filled < 0, filled, roomiest[filled])
    return bins


def pack_apart(sizes: Ints, owner: Ints, *, hands: int, each: int, capacity: int) -> Ints | None:
    """Return each sample's bin of `hands * each`, or None if no way was found; `sizes` descend.

    Samples of one owner go to its own bins; the few, and small, that do not fit there go where there is room.
    """
    by_owner = ascending(owner)
    ends = np.bincount(owner, minlength=hands).cumsum()
    parts = [by_owner[end - n : end] for end, n in zip(ends, np.diff(ends, prepend=0), strict=True)]
    for share in (*LEVELLED, None):
        bins = np.full(len(sizes), -1)
        for hand, mine in enumerate(parts):
            own = sizes[mine]
            some = (
                _fill(own.tolist(), each, capacity=capacity)
                if share is None
                else _fit(own, each, capacity=capacity, levelled=round(share * len(own)))
            )
            if some is None:
                break
            bins[mine] = np.where(some < 0, some, some + hand * each)
        else:
            left = bins < 0
            load = np.bincount(bins[~left], weights=sizes[~left], minlength=hands * each).astype(np.int64)
            bins[left] = _best_fit(sizes[left].tolist(), (capacity - load).tolist())
            bins = _refill(sizes, bins, hands * each, capacity=capacity)
            if not (bins < 0).any():
                return _fill_empty(bins, hands * each)
    return None


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
    """Return each sample's bin, -1 where it fits in none; None if levelling went over the capacity."""
    large = max(levelled, count) if levelled else 0
    bins, loads = _level(sizes[:large], count)
    if loads.max() > capacity:
        return None
    return np.concatenate([bins, _best_fit(sizes[large:].tolist(), (capacity - loads).tolist())])


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


def _best_fit(sizes: Sequence[int], room: Sequence[int]) -> Ints:
    """Give each size to a bin with the least room that holds it, of several the last to get it; -1 if it fits nowhere.

    `last` has the last bin with so much room, `before` the one that had it before.
    """
    last, before = [-1] * (max(room, default=0) + 1), [-1] * len(room)
    for index in reversed(range(len(room))):
        before[index], last[room[index]] = last[room[index]], index
    rooms = sorted(set(room))
    chosen = []
    for size in sizes:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            chosen.append(-1)
            continue
        had = rooms[at]
        index = last[had]
        chosen.append(index)
        last[had] = before[index]
        if last[had] < 0:
            del rooms[at]
        left = had - size
        if last[left] < 0:
            insort(rooms, left)
        before[index] = last[left]
        last[left] = index
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
