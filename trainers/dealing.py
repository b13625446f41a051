"""Micro-batches onto ranks: equal counts, and costs as equal as swaps can make them.

Pure functions over arrays. A deal gives every rank a bin a round, the costliest to the lightest
rank; then ranks are paired, heaviest with lightest, and each pair swaps two bins, or two samples,
that bring it closest together, all pairs at once, as long as that gains something. Few things get
stuck before they are even: those are kicked (some swaps at random, by a fixed seed) and tried again.
"""

import math
from random import Random

import numpy as np

from asyncrl.trainers.exchange import exchange
from asyncrl.trainers.swaps import GAIN, Floats, Ints, Things, ascending, even_out, swap

CLOSE = 1e-6
"""Stop swapping samples once the heaviest rank is within this share of the mean."""
MOVABLE = 256
"""As many samples a rank are enough to choose swaps from."""
TRIES, MOST = 3, 64
"""Double swaps for each rank, and in all."""
FEW, SOME = 256, 1024
"""As many things, or fewer, are few, and searched in every way; as many are some, and kicked."""
KICKED = 192
"""Double swaps that are tried after kicks, over the number of ranks."""
SWAPS_A_KICK = 4
EVEN = 1e-5
"""Good enough: within this share of the mean."""
COUNTS = 1e6
"""Whole costs below this, like tokens, are worth being even to the last one."""


def deal(costs: Floats, *, ranks: int, in_order: bool = False) -> Ints:
    """Return the rank of each bin, equally many a rank; `ranks` divides their number.

    Costliest first; `in_order`: rounds are taken as they come, and only within one costliest first.
    """
    order = np.argsort(-costs, kind="stable")
    if in_order:
        order = np.lexsort((-costs, np.arange(len(costs)) // ranks))
    loads = np.zeros(ranks)
    rank = np.zeros(len(costs), np.int64)
    for some in order.reshape(-1, ranks):
        lightest = np.argsort(loads, kind="stable")
        rank[some] = lightest
        loads[lightest] += costs[some]
    return rank


def totals(owner: Ints, costs: Floats, *, hands: int) -> Floats:
    """Return what each of `hands` bins or ranks costs in all."""
    return np.bincount(owner, weights=costs, minlength=hands).astype(np.float64)


def attainable(costs: Floats, *, ranks: int, each: int) -> float:
    """Return a load of the heaviest rank that is good enough: even, or what its costliest sample forces on it.

    A rank has `each` micro-batches at least, so the costliest sample has company of the cheapest.
    Whole costs do not add up to less than a whole number.
    """
    mean = float(costs.sum()) / ranks
    forced = float(costs.max() + (each - 1) * costs.min())
    counts = mean < COUNTS and (costs == np.rint(costs)).all()
    even = math.ceil(mean) if counts else mean * (1 + EVEN)
    return max(even, forced * (1 + CLOSE))


def swap_bins(rank: Ints, costs: Floats, *, ranks: int) -> Ints:
    """Return the rank of each bin after swaps of whole bins."""
    nothing = np.zeros(len(rank), np.int64)
    things = Things(rank.copy(), costs, nothing, nothing, np.zeros(1, np.int64), np.zeros(1, np.int64), len(rank))
    loads = totals(rank, costs, hands=ranks)
    enough = attainable(costs, ranks=ranks, each=len(costs) // ranks)
    return _search(things, loads, bins=None, enough=enough, kicked=KICKED // ranks).rank


def deal_samples(costs: Floats, hands: int, *, swaps: bool = False) -> Ints:
    """Return the rank or update of each sample: numbers differ by one at most, and after swaps costs hardly."""
    padded = np.concatenate([costs, np.zeros(-len(costs) % hands)])
    dealt = deal(padded, ranks=hands)
    return (swap_bins(dealt, padded, ranks=hands) if swaps else dealt)[: len(costs)]


def swap_samples(
    bins: Ints,
    rank: Ints,
    *,
    sizes: Ints,
    costs: Floats,
    capacity: int,
    ranks: int,
    kicked: int = 0,
    tolerance: float | None = None,
) -> Ints:
    """Return the bin of each sample after swaps of samples; `rank` is each bin's, equally many a rank.

    Stops once no rank is over the mean by more than the `tolerance`, if there is one.
    """
    none = np.zeros(ranks, np.int64)
    some = slice(None, None, -(-len(bins) // max(SOME, MOVABLE * ranks)))
    things = Things(
        rank=np.concatenate([rank[bins[some]], np.arange(ranks)]),
        cost=np.concatenate([costs[some], none]),
        size=np.concatenate([sizes[some], none]),
        bin=np.concatenate([bins[some], none]),
        room=capacity - np.bincount(bins, weights=sizes, minlength=len(rank)).astype(np.int64),
        members=np.bincount(bins, minlength=len(rank)),
        real=len(bins[some]),
    )
    bins_of = ascending(rank).reshape(ranks, -1)
    loads = totals(rank[bins], costs, hands=ranks)
    if tolerance is None:
        enough = attainable(costs, ranks=ranks, each=bins_of.shape[1])
    else:
        enough = float(loads.mean()) * (1 + tolerance)
    moved = bins.copy()
    moved[some] = _search(things, loads, bins=bins_of, enough=enough, kicked=kicked).bin[: things.real]
    return moved


def swap_freely(owner: Ints, costs: Floats, *, hands: int, enough: float | None = None, kicked: int = 0) -> Ints:
    """Return the owner of each sample, of `hands` bins or ranks, after swaps and moves without regard to room.

    Stops once none has more than `enough`, or after so many `kicked` double swaps.
    """
    none, each = np.zeros(hands, np.int64), np.arange(hands)
    home = np.concatenate([owner, each])
    members = np.bincount(owner, minlength=hands)
    nothing = np.zeros(len(home), np.int64)
    things = Things(home, np.concatenate([costs, none]), nothing, home.copy(), none, members, len(owner))
    loads = totals(owner, costs, hands=hands)
    if enough is None:
        enough = attainable(costs, ranks=hands, each=1)
    return _search(things, loads, bins=each[:, None], enough=enough, kicked=kicked).rank[: len(owner)]


def _search(things: Things, loads: Floats, *, bins: Ints | None, enough: float, kicked: int = 0) -> Things:
    """Even out; where that ends too early, swap two at a time; and if there are few, kick and try again."""
    ranks = len(loads)
    even_out(things, loads, bins=bins, enough=max(enough, loads.mean() * (1 + CLOSE)))
    tries = min(MOST, TRIES * ranks)
    exchange(things, loads, bins=bins, enough=enough, tries=tries)
    random = Random(0)  # Its `random` alone is the same in every version, as a replayed plan must be.
    left = kicked if things.real <= SOME and ranks > 1 else 0
    while left > 0 and loads.max() > enough:
        other, other_loads = things.copy(), loads.copy()
        for _ in range(SWAPS_A_KICK):
            x, y = np.array([[int(random.random() * things.real)] for _ in range(2)])
            if other.rank[x] != other.rank[y] and _fits(other, x, y):
                swap(other, x, y, other_loads)
        left -= 1 + exchange(other, other_loads, bins=bins, enough=enough, tries=tries)
        other_loads = totals(other.rank, other.cost, hands=ranks)
        if other_loads.max() < loads.max() * (1 - GAIN):
            things, loads = other, other_loads
    return things


def _fits(things: Things, x: Ints, y: Ints) -> bool:
    grows = things.size[x] - things.size[y]
    return bool((grows <= things.room[things.bin[y]]) & (-grows <= things.room[things.bin[x]]))
