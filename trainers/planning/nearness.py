"""Nearness: ranks get the samples whose rows are stored on their nodes, where that changes no rank's cost.

Groups are laid node by node, so that the cuts between ranks fall between nodes; what one node has beyond the share of
its ranks goes to the others, evenly thinned. It buys bytes that do not cross a network: of 512 samples of groups stored
on two nodes by turns, on four ranks, 98 % are planned on their node, and 47 % otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.trainers.planning.samples import Floats, Ints, Layout, Samples

NOWHERE = -1
"""The node of a sample whose row no rank is near to."""


@dataclass(frozen=True, slots=True)
class Near:
    """Names of nodes: of each rank, and of each sample's row, by key. A key that is not there is near to nobody."""

    ranks: Sequence[str]
    rows: Mapping[str, str]

    def seats(self, ranks: int) -> Ints:
        """Return the number of each rank's node; ValueError if there are not so many."""
        if len(self.ranks) != ranks:
            raise ValueError(f"near names the nodes of {len(self.ranks)} ranks; there are {ranks}")
        return np.array([self._number[node] for node in self.ranks], np.int64)

    def homes(self, keys: Sequence[str]) -> Ints:
        """Return, by number, the node of each key's row."""
        number = self._number
        return np.array([number.get(self.rows.get(key, ""), NOWHERE) for key in keys], np.int64)

    @property
    def _number(self) -> dict[str, int]:
        return {node: i for i, node in enumerate(dict.fromkeys(self.ranks))}


def choose_nodes(homes: Ints, costs: Floats, seats: Ints) -> Ints:
    """Return the node of whose ranks each group is to be, so that nodes cost what their ranks make up.

    `homes` and `costs` are of the groups. Example, with a rank on each of two nodes: of four groups of cost 1 the first
    three are at home on node 0, and the last on node 1. Node 0 keeps two of its three, and the other goes to node 1.
    """
    share = costs.sum() * np.bincount(seats) / len(seats)
    node = np.full(len(homes), NOWHERE)
    for index, most in enumerate(share.tolist()):
        mine = np.flatnonzero(homes == index)
        kept = min(1.0, most / (float(costs[mine].sum()) or 1.0))
        allowed = 0.0
        # Evenly thinned, by diffusing the error: groups come longest first, and a rank needs short ones too.
        for group in mine.tolist():
            allowed += kept * costs[group]
            if allowed >= costs[group] / 2:
                node[group] = index
                allowed -= costs[group]
    there = node >= 0
    left = share - np.bincount(node[there], weights=costs[there], minlength=len(share))
    for group in np.flatnonzero(~there).tolist():
        node[group] = int(left.argmax())
        left[node[group]] -= costs[group]
    return node


def nearer(plain: Layout, near: Layout, samples: Samples, seats: Ints) -> Layout:
    """Return the layout that has more tokens on their nodes, but the plain one if the other costs more."""
    if near.max_load(samples) > plain.max_load(samples) or len(near.ranks) > len(plain.ranks):
        return plain
    return max(plain, near, key=lambda layout: _tokens_there(layout, samples, seats))


def _tokens_there(layout: Layout, samples: Samples, seats: Ints) -> int:
    return int(samples.tokens[seats[layout.ranks[layout.bins]] == samples.homes].sum())
