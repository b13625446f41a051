"""Micro-batches onto ranks: equal counts, and costs as equal as swaps can make them.

Pure functions over arrays. A deal gives every rank a bin a round, the costliest to the lightest
rank; then ranks are paired, heaviest with lightest, and each pair swaps two bins, or two samples,
that bring it closest together, all pairs at once, as long as that gains something. Few things get
stuck before they are even: those are kicked (some swaps at random, by a fixed seed) and tried again.
"""

import copy
import math
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
CLOSE = 1e-6
"""Stop swapping samples once the heaviest rank is within this share of the mean."""
CLOSE_BY_BINS = 1e-3
"""Stop swapping whole bins, if samples can be swapped afterwards."""
NEAR = np.arange(-4, 4)
"""Partners that a thing is tried against: the eight whose costs are closest to what would make a pair equal."""
FEW = 256
"""As many things, or fewer, are few."""
KICKS = 16
"""As many in vain, one after another, are the last."""
SEARCH = 512
"""Kicks in vain times things, for the fewest."""
SWAPS_A_KICK = 4
EVEN = 1e-5
"""Good enough: no kicks for ranks within this share of the mean."""
GAIN = 1e-9
"""Less than this share is rounding, and would let a search go on for ever."""
LOOKED_AT = 1024
"""Things of heavy ranks that one round looks at."""


@dataclass(frozen=True, slots=True)
class Things:
    """What ranks swap, and what they may: each thing has a rank, a cost, a size and a bin with some room.

    From `real` on, things are not samples but room, one a rank: its roomiest bin. A swap with one of these
    moves the sample there. A bin's only sample is never moved, so that no bin becomes empty.
    """

    rank: Ints
    cost: Floats
    size: Ints
    bin: Ints
    room: Ints
    members: Ints
    real: int


def deal(costs: Floats, *, ranks: int) -> Ints:
    """Return the rank of each bin, equally many a rank; `ranks` divides their number."""
    order = np.argsort(-costs, kind="stable")
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
    whole = math.ceil(mean) if (costs == np.rint(costs)).all() else 0
    return max(mean * (1 + EVEN), forced * (1 + CLOSE), whole)


def swap_bins(rank: Ints, costs: Floats, *, ranks: int, close: float = CLOSE, rounds: int | None = None) -> Ints:
    """Return the rank of each bin after swaps of whole bins."""
    nothing = np.zeros(len(rank), np.int64)
    things = Things(rank.copy(), costs, nothing, nothing, np.zeros(1, np.int64), np.zeros(1, np.int64), len(rank))
    loads = totals(rank, costs, hands=ranks)
    if rounds is None:
        return _search(things, loads, bins=None).rank
    _even_out(things, loads, bins=None, enough=loads.mean() * (1 + close), rounds=rounds)
    return things.rank


def swap_samples(bins: Ints, rank: Ints, *, sizes: Ints, costs: Floats, capacity: int, loads: Floats) -> Ints:
    """Return the bin of each sample after swaps of samples; `rank` is each bin's, equally many a rank."""
    ranks, none = len(loads), np.zeros(len(loads), np.int64)
    things = Things(
        rank=np.concatenate([rank[bins], np.arange(ranks)]),
        cost=np.concatenate([costs, none]),
        size=np.concatenate([sizes, none]),
        bin=np.concatenate([bins, none]),
        room=capacity - np.bincount(bins, weights=sizes, minlength=len(rank)).astype(np.int64),
        members=np.bincount(bins, minlength=len(rank)),
        real=len(bins),
    )
    bins_of = np.argsort(rank, kind="stable").reshape(ranks, -1)
    return _search(things, loads.copy(), bins=bins_of).bin[: things.real]


def swap_freely(owner: Ints, costs: Floats, *, hands: int, enough: float | None = None, kicks: int = KICKS) -> Ints:
    """Return the owner of each sample, of `hands` bins or ranks, after swaps and moves without regard to room.

    Stops once none has more than `enough`, or after so many `kicks` in vain.
    """
    none, each = np.zeros(hands, np.int64), np.arange(hands)
    home = np.concatenate([owner, each])
    members = np.bincount(owner, minlength=hands)
    nothing = np.zeros(len(home), np.int64)
    things = Things(home, np.concatenate([costs, none]), nothing, home.copy(), none, members, len(owner))
    loads = totals(owner, costs, hands=hands)
    return _search(things, loads, bins=each[:, None], enough=enough, kicks=kicks).rank[: len(owner)]


def _search(
    things: Things, loads: Floats, *, bins: Ints | None, enough: float | None = None, kicks: int = KICKS
) -> Things:
    """Even out, and if that ends too early and the things are few, kick and try again; returns the best."""
    costs = things.cost[: things.real]
    close = enough if enough is not None else loads.mean() * (1 + CLOSE)
    each = bins.shape[1] if bins is not None else len(costs) // len(loads)
    even = enough if enough is not None else attainable(costs, ranks=len(loads), each=each)
    _even_out(things, loads, bins=bins, enough=close)
    random = Random(0)  # Its `random` alone is the same in every version, as a replayed plan must be.
    vain, kicks = 0, max(kicks, SEARCH // things.real)
    for _ in range(8 * kicks if things.real <= FEW and len(loads) > 1 else 0):
        if vain >= kicks or loads.max() <= even:
            break
        other, other_loads = copy.deepcopy(things), loads.copy()
        for _ in range(SWAPS_A_KICK):
            x, y = np.array([[int(random.random() * things.real)] for _ in range(2)])
            if other.rank[x] != other.rank[y] and _fits(other, x, y):
                _swap(other, x, y, other_loads)
        _even_out(other, other_loads, bins=bins, enough=close)
        vain += 1
        other_loads = totals(other.rank, other.cost, hands=len(loads))
        if other_loads.max() < loads.max() * (1 - GAIN):
            things, loads, vain = other, other_loads, 0
    return things


def _fits(things: Things, x: Ints, y: Ints) -> bool:
    grows = things.size[x] - things.size[y]
    return bool((grows <= things.room[things.bin[y]]) & (-grows <= things.room[things.bin[x]]))


def _even_out(things: Things, loads: Floats, *, bins: Ints | None, enough: float, rounds: int | None = None) -> None:
    """Swap in place until no rank costs more than `enough`, the heaviest gains with no other, or the rounds are over.

    Without `rounds`, there are more of them for few things than for many. `bins` are those of each rank.
    """
    ranks = len(loads)
    half, mean = ranks // 2, loads.mean()
    by_cost = np.argsort(things.cost, kind="stable")
    stuck = 0
    for turn in range(rounds or max(8, min(96, 4096 // len(by_cost)))):
        if stuck >= 2 * half or loads.max() <= enough:
            return
        if bins is not None:
            things.bin[things.real :] = bins[np.arange(ranks), things.room[bins].argmax(1)]
        order = np.argsort(-loads, kind="stable")
        partner = _pairs(order, stuck)
        x, y, gain = _best_swaps(things, by_cost, partner, loads, turn)
        kept = gain > GAIN * mean
        stuck = 0 if (things.rank[x[kept]] == order[0]).any() else stuck + 1
        _swap(things, x[kept], y[kept], loads)


def _pairs(order: Ints, stuck: int) -> Ints:
    """Return the lighter partner of each rank, -1 for none; others as long as the heaviest is stuck."""
    half = len(order) // 2
    heavy, light = order[:half], order[::-1][:half]
    if stuck >= half:
        heavy, light = order[: 2 * half : 2], order[1::2][::-1]
    partner = np.full(len(order), -1)
    shift = stuck % half
    partner[heavy] = np.concatenate([light[shift:], light[:shift]])
    return partner


def _best_swaps(things: Things, by_cost: Ints, partner: Ints, loads: Floats, turn: int) -> tuple[Ints, Ints, Floats]:
    """For each rank with a partner: a thing of its, one of the partner's, and how much closer a swap brings them."""
    rank, cost, size, home = things.rank, things.cost, things.size, things.bin
    order = by_cost[np.argsort(rank[by_cost].astype(np.int16), kind="stable")]
    members = np.bincount(rank, minlength=len(partner))
    ends = members.cumsum()
    stride = -(-len(order) // max(2 * LOOKED_AT, 32 * len(partner)))
    x = order[turn % stride :: stride]
    x = x[(partner[rank[x]] >= 0) & (x < things.real)]
    mine = rank[x]
    other = partner[mine]
    apart = loads[mine] - loads[other]
    cost_x, size_x, home_x = cost[x], size[x], home[x]
    span = 2 * cost[by_cost[-1]] + 1
    wanted = np.maximum(cost_x - apart / 2, 0)
    at = np.searchsorted(rank[order] * span + cost[order], other * span + wanted)[:, None] + NEAR
    fits = (at >= (ends - members)[other][:, None]) & (at < ends[other][:, None])
    y = order.take(at, mode="clip")
    grows = size_x[:, None] - size[y]
    fits &= grows <= things.room[home[y]]
    fits &= -grows <= things.room[home_x][:, None]
    if things.real < len(rank):
        fits &= (things.members[home_x] > 1)[:, None] | (y < things.real)
    left = np.abs(2 * (cost_x[:, None] - cost[y]) - apart[:, None])
    left[~fits] = np.inf
    column = left.argmin(1)
    gain = apart - left[np.arange(len(x)), column]
    row = np.lexsort((-gain, mine))
    row = row[_firsts(mine[row])]
    return x[row], y[row, column[row]], gain[row]


def _firsts(sorted_numbers: Ints) -> NDArray[np.bool_]:
    """Mark the first of each run of equal numbers."""
    first = np.ones(len(sorted_numbers), bool)
    first[1:] = sorted_numbers[1:] != sorted_numbers[:-1]
    return first


def _swap(things: Things, x: Ints, y: Ints, loads: Floats) -> None:
    """Swap each of x with its y; the pairs share no rank and so no bin."""
    moved, grows = things.cost[x] - things.cost[y], things.size[x] - things.size[y]
    from_rank, to_rank = things.rank[x], things.rank[y]
    loads[from_rank] -= moved
    loads[to_rank] += moved
    from_bin, to_bin = things.bin[x], things.bin[y]
    things.room[from_bin] += grows
    things.room[to_bin] -= grows
    is_move = y >= things.real
    things.members[from_bin] -= is_move
    things.members[to_bin] += is_move
    back = ~is_move
    things.rank[y[back]], things.bin[y[back]] = from_rank[back], from_bin[back]
    things.rank[x], things.bin[x] = to_rank, to_bin
