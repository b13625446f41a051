"""How many requests go to an engine at once, by how full its cache is: additive increase, multiplicative decrease.

An engine whose cache is full takes the youngest sequence out and computes it anew later, again and again. So the limit
grows by one at a time while the engine takes all that it is given, and shrinks by a factor once it cannot (Chiu and
Jain, 1989, as in TCP). `scripts/bench_in_flight.py` tells what that buys over limits that stand still.

Invariant: the limit is at least 1 and at most `most`.
"""

from dataclasses import dataclass

WINDOW_S = 0.1
"""Time between two steps up: shorter overshoots before answers are long, longer leaves the cache empty."""
HOLD_S = 2.0
"""Time between two cuts: shorter cuts again for what the last cut is about to mend, longer lets preemptions go on."""
CUT = 0.8
"""What a cut leaves: less empties the cache (0.5 loses 1 to 3 % of the tokens per second), more preempts for longer."""
HIGH_MARK = 0.95
"""Share of the cache above which it is cut: answers that run still grow, so the last free room is theirs."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What an engine says of itself: the share of its cache in use, requests that wait in it, preemptions so far."""

    cache_used: float
    waiting: int
    preemptions: int


class InFlightLimit:
    """The limit now, from `most` on: an engine that is never pressed is never held back.

    Example: of at most 64 all are in flight when the cache is full. The limit is 51, and 40 two seconds later, by when
    the cache has room. From then on it grows by one each tenth of a second in which 40, 41, ... are in flight.
    """

    def __init__(self, most: int) -> None:
        self._most = self._limit = most
        self._preemptions = 0
        self._next_step = self._next_cut = float("-inf")

    @property
    def limit(self) -> int:
        return self._limit

    def observe(self, pressure: Pressure, *, in_flight: int, now: float) -> bool:
        """Adapt to what an engine says at `now`, in seconds; return whether the limit changed."""
        before = self._limit
        preempted = pressure.preemptions > self._preemptions
        self._preemptions = pressure.preemptions
        if preempted or pressure.cache_used > HIGH_MARK:
            if now >= self._next_cut:
                self._limit = max(1, int(CUT * min(self._limit, in_flight)))
                self._next_cut = now + HOLD_S
            self._next_step = now + WINDOW_S
        elif now >= self._next_step and in_flight >= self._limit and not pressure.waiting:
            self._limit = min(self._most, self._limit + 1)
            self._next_step = now + WINDOW_S
        return self._limit != before
