"""The order of a mixture: which record of which set comes next.

Invariant: the next record depends on sizes, weights, seed and the counts of records drawn, and on nothing else.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

from asyncrl.collectors.data.permutation import Permutation


class Mixture:
    """Draws from several sets in proportion to their weights; without `weights`, to their sizes.

    Sets take turns by smooth weighted round-robin (nginx's): each draw goes to the set that is furthest behind its
    share, so that after any number of draws every set has had its share to within less than one draw per set. With
    weights 3 and 1: A A B A A A B A …. Within a set the order is shuffled anew for each of its passes. By their sizes,
    all sets end their passes together, and one epoch has each record once.
    """

    def __init__(self, sizes: Mapping[str, int], weights: Sequence[float] | None = None, *, seed: int) -> None:
        self._names = list(sizes)
        self._sizes = list(sizes.values())
        self._seed = seed
        self._weights = _integers(self._sizes if weights is None else weights)
        self._sum = sum(self._weights)
        self._drawn = [0] * len(sizes)
        self._passes: dict[int, tuple[int, Permutation]] = {}

    @property
    def position(self) -> int:
        """How many records were drawn."""
        return sum(self._drawn)

    def draw(self) -> tuple[int, int]:
        """Return (set, record) of the next draw, both as indices."""
        turn = self.position + 1
        behind = [turn * weight - drawn * self._sum for weight, drawn in zip(self._weights, self._drawn, strict=True)]
        chosen = behind.index(max(behind))
        passes, place = divmod(self._drawn[chosen], self._sizes[chosen])
        self._drawn[chosen] += 1
        return chosen, self._shuffle(chosen, passes)(place)

    def state(self) -> dict[str, int]:
        """Return how many records of each set were drawn."""
        return dict(zip(self._names, self._drawn, strict=True))

    def restore(self, state: Mapping[str, int]) -> None:
        """Go to a place that `state` returned; ValueError if it is of other sets."""
        if set(state) != set(self._names):
            raise ValueError(f"the place is one in the sets {sorted(state)}, and the data has {sorted(self._names)}")
        self._drawn = [int(state[name]) for name in self._names]

    def _shuffle(self, chosen: int, passes: int) -> Permutation:
        known = self._passes.get(chosen)
        if known is None or known[0] != passes:
            key = f"{self._seed}/{passes}/{self._names[chosen]}"
            known = self._passes[chosen] = (passes, Permutation(self._sizes[chosen], key))
        return known[1]


def _integers(weights: Sequence[float]) -> list[int]:
    """Return weights as integers of the same proportions: a rounded sum would make the order one of the machine."""
    exact = [Fraction(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]
