"""Two swaps at once between two ranks: hundreds of swaps make tens of thousands of pairs of them.

One of these moves almost exactly what a heavy rank has too much of, or a light one lacks: a rank
after another gets its share, where single swaps have got stuck.
"""

import numpy as np

from asyncrl.trainers.swaps import GAIN, Floats, Ints, Things, swap

MOST = 48
"""Things of a rank that are looked at."""


def exchange(things: Things, loads: Floats, *, enough: float, bins: Ints | None, tries: int) -> int:
    """Swap in place until no rank costs more than `enough`, the heaviest gains with no other, or after so many tries.

    Returns the number of tries.
    """
    mean = loads.mean()
    lightest = 0
    for turn in range(tries):
        heavy = int(loads.argmax())
        if loads[heavy] <= enough or lightest >= len(loads) - 1:
            return turn
        light = int(np.argsort(loads, kind="stable")[lightest])
        if bins is not None:
            for rank in (heavy, light):
                things.bin[things.real + rank] = bins[rank, things.room[bins[rank]].argmax()]
        x, y = _best_two(things, heavy, light, wanted=min(loads[heavy] - enough, enough - loads[light]), turn=turn)
        moved = float((things.cost[x] - things.cost[y]).sum())
        if max(loads[heavy] - moved, loads[light] + moved) < loads[heavy] - GAIN * mean:
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
    apart = (np.searchsorted(moved, wanted - moved)[:, None] + np.arange(-2, 2)).clip(0, len(moved) - 1)
    miss = np.abs(moved[:, None] + moved[apart] - wanted)
    home_x, home_y = things.bin[x[row]], things.bin[y[column]]
    same_x, same_y = (home_x, home_y) if things.size.any() else (row, column)
    miss[(same_x[:, None] == same_x[apart]) | (same_y[:, None] == same_y[apart])] = np.inf
    one, which = divmod(int(miss.argmin()), miss.shape[1])
    alone = int(np.abs(moved - wanted).argmin())
    both = [alone] if abs(moved[alone] - wanted) <= miss[one, which] else [one, int(apart[one, which])]
    return x[row[both]], y[column[both]]


def _some(things: Things, rank: int, turn: int) -> Ints:
    mine = np.flatnonzero(things.rank == rank)
    stride = -(-len(mine) // MOST)
    return mine[turn % stride :: stride]


def _swap_either_way(things: Things, x: int, y: int, loads: Floats) -> None:
    """Swap two things; one of them may stand for room."""
    first, second = (y, x) if x >= things.real else (x, y)
    swap(things, np.array([first]), np.array([second]), loads)
