"""Costs onto ranks by differences: the two that differ most go to opposite ends, until one deal is left.

N. Karmarkar, R. M. Karp, "The differencing method of set partitioning", 1982. Few samples come out
more even than longest first leaves them; many are evened out by swaps in any case.
"""

from heapq import heapify, heappop, heappush

import numpy as np

from asyncrl.trainers.swaps import Floats, Ints


def deal_by_differences(costs: Floats, *, ranks: int) -> Ints:
    """Return the rank of each sample."""
    none: tuple[tuple[float, tuple[int, ...]], ...] = ((0.0, ()),) * (ranks - 1)
    deals = [(-cost, at, (*none, (cost, (at,)))) for at, cost in enumerate(costs.tolist())]
    heapify(deals)
    while len(deals) > 1:
        _, at, one = heappop(deals)
        _, _, other = heappop(deals)
        both = sorted((x + y, some + more) for (x, some), (y, more) in zip(one, reversed(other), strict=True))
        heappush(deals, (both[0][0] - both[-1][0], at, tuple(both)))
    rank = np.empty(len(costs), np.int64)
    for index, (_, some) in enumerate(deals[0][2]):
        rank[list(some)] = index
    return rank
