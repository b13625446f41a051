"""Swaps between pairs of ranks, all pairs at once, until they are even.

Invariant: no swap puts a bin over its room, empties one, or makes the heavier rank of its pair heavier.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NEAR = np.arange(-4, 4)
"""Partners that a thing is tried against: the eight whose costs are closest to what would make a pair equal."""
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

    def copy(self) -> "Things":
        return replace(
            self, rank=self.rank.copy(), bin=self.bin.copy(), room=self.room.copy(), members=self.members.copy()
        )


def even_out(things: Things, loads: Floats, *, bins: Ints | None, enough: float, rounds: int = 8) -> None:
    """Swap in place until no rank costs more than `enough`, the heaviest gains nothing, or the rounds are over.

    `bins` are those of each rank.
    """
    ranks = len(loads)
    half, mean = ranks // 2, loads.mean()
    by_cost = np.argsort(things.cost, kind="stable")
    for turn in range(rounds):
        if loads.max() <= enough:
            return
        if bins is not None:
            things.bin[things.real :] = bins[np.arange(ranks), things.room[bins].argmax(1)]
        order = np.argsort(-loads, kind="stable")
        partner = np.full(ranks, -1)
        partner[order[:half]] = order[::-1][:half]
        x, y, gain = _best_swaps(things, by_cost, partner, loads, turn)
        kept = gain > GAIN * mean
        is_stuck = not (things.rank[x[kept]] == order[0]).any()
        swap(things, x[kept], y[kept], loads)
        if is_stuck:
            return


def _best_swaps(things: Things, by_cost: Ints, partner: Ints, loads: Floats, turn: int) -> tuple[Ints, Ints, Floats]:
    """For each rank with a partner: a thing of its, one of the partner's, and how much closer a swap brings them."""
    rank, cost, size, home = things.rank, things.cost, things.size, things.bin
    order = by_cost[ascending(rank[by_cost])]
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


def ascending(numbers: Ints) -> Ints:
    """Return the order of numbers of at least 0, equal ones as they come; numpy sorts 16 bits by radix, far faster."""
    return np.argsort(numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers, kind="stable")


def _firsts(sorted_numbers: Ints) -> NDArray[np.bool_]:
    """Mark the first of each run of equal numbers."""
    first = np.ones(len(sorted_numbers), bool)
    first[1:] = sorted_numbers[1:] != sorted_numbers[:-1]
    return first


def swap(things: Things, x: Ints, y: Ints, loads: Floats) -> None:
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
