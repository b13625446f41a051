"""Two swaps at once between two ranks: hundreds of swaps make tens of thousands of pairs of them.

One of these moves almost exactly what a heavy rank has too much of, or a light one lacks: a rank
after another gets its share, where single swaps have got stuck.
"""

import numpy as np
from numpy.typing import NDArray

from asyncrl.trainers.swaps import GAIN, Floats, Ints, Things, swap

MOST = 48
"""Things of a rank that are looked at."""
NEAR, TRIED = np.arange(-2, 2), 64
"""Partners of a swap that are looked at, and pairs of swaps that may not fit together."""


def exchange(things: Things, loads: Floats, *, enough: float, bins: Ints | None, tries: int) -> int:
    """Swap in place until no rank costs more than `enough`, or after so many tries; return their number.

    What the heaviest rank cannot give to any that lacks something, it passes on to the next that does not:
    that one has other things to give.
    """
    ranks, gain = len(loads), GAIN * float(loads.mean())
    lightest = 0
    for turn in range(tries):
        order = np.argsort(loads, kind="stable")
        heavy = int(order[-1])
        if loads[heavy] <= enough or lightest == ranks - 1:
            return turn
        light = int(order[lightest])
        over, lacks = loads[heavy] - enough, enough - loads[light]
        passed_on = lacks <= gain
        if passed_on:
            light = int(order[lightest + turn % (ranks - 1 - lightest)])
        if bins is not None:
            for rank in (heavy, light):
                things.bin[things.real + rank] = bins[rank, things.room[bins[rank]].argmax()]
        x, y = _best_two(things, heavy, light, wanted=over if passed_on else min(over, lacks), turn=turn)
        moved = float((things.cost[x] - things.cost[y]).sum())
        most = max(loads[heavy] - moved, loads[light] + moved)
        if most < loads[heavy] - gain or (passed_on and moved > gain and most <= loads[heavy] + gain):
            for index in range(len(x)):
                _swap_either_way(things, x[index], y[index], loads)
            lightest = 0
        else:
            lightest += 1
    return tries


def _best_two(things: Things, heavy: int, light: int, *, wanted: float, turn: int) -> tuple[Ints, Ints]:
    """Return one or two things of the heavy rank, and those of the light one for which to swap them."""
    x, y = _some(things, heavy, turn), _some(things, light, turn)
    grows = things.size[x][:, None] - things.size[y]
    fits = (grows <= things.room[things.bin[y]]) & (-grows <= things.room[things.bin[x]][:, None])
    if things.real < len(things.rank):
        fits &= (things.members[things.bin[x]] > 1)[:, None] | (y < things.real)
        fits &= (things.members[things.bin[y]] > 1) | (x < things.real)[:, None]
        fits &= (x < things.real)[:, None] | (y < things.real)
    row, column = np.nonzero(fits)
    moved = things.cost[x[row]] - things.cost[y[column]]
    order = np.argsort(moved, kind="stable")
    row, column, moved = row[order], column[order], moved[order]
    if not len(moved):
        return x[:0], y[:0]
    apart = (np.searchsorted(moved, wanted - moved)[:, None] + NEAR).clip(0, len(moved) - 1).ravel()
    miss = np.abs(np.repeat(moved, len(NEAR)) + moved[apart] - wanted)
    nearest = np.argpartition(miss, min(TRIED, len(miss) - 1))[:TRIED]
    pair = np.stack([nearest // len(NEAR), apart[nearest]])
    left = np.where(_fit_together(things, x[row[pair]], y[column[pair]]), miss[nearest], np.inf)
    best = int(left.argmin())
    alone = int(np.abs(moved - wanted).argmin())
    both = [alone] if abs(moved[alone] - wanted) <= left[best] else pair[:, best].tolist()
    return x[row[both]], y[column[both]]


def _fit_together(things: Things, x: Ints, y: Ints) -> NDArray[np.bool_]:
    """Say of pairs of swaps, each of which fits, whether both do; x, y: two rows, of the first and the second.

    As a rank has one thing that stands for room, only one of the two is a move, and leaves no bin empty.
    """
    grows = (things.size[x] - things.size[y]).sum(0)
    fits: NDArray[np.bool_] = (x[0] != x[1]) & (y[0] != y[1])
    for home, more in ((things.bin[x], -grows), (things.bin[y], grows)):
        fits &= (more <= things.room[home[0]]) | (home[0] != home[1])
    return fits


def _some(things: Things, rank: int, turn: int) -> Ints:
    mine = np.flatnonzero(things.rank == rank)
    stride = -(-len(mine) // MOST)
    return mine[turn % stride :: stride]


def _swap_either_way(things: Things, x: int, y: int, loads: Floats) -> None:
    """Swap two things; one of them may stand for room."""
    first, second = (y, x) if x >= things.real else (x, y)
    swap(things, np.array([first]), np.array([second]), loads)
