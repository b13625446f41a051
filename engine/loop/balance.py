"""The balance: which collector gets the next group. A fold over the event log, so a log says what it chose, and why.

Each group goes where it is expected to arrive first. What is expected of a collector is the mean time from the
dispatch to the put of its last groups, times (1 + load / usual load) / 2: half of a group's time is its own, half
grows with what the collector has in flight. So equal collectors have equally much in flight, and a slow one gets a
group only while the others have so much that theirs would take as long.

Example: groups of one collector take 1 s, of the other 10 s, with 4 in flight at each. The slow one, with none left
in flight, is expected to take (1 + 1/4) / 2 · 10 s = 6.25 s; the quick one takes that long with 46 in flight.

The pace of a collector is not known until its first group arrives, so a slow one gets an equal share of the first
grants. It is late if it has brought no group in twice the time of the longest group of the others. Its groups are then
issued again elsewhere (`recall.py`), and it gets one group at a time, after longer and longer pauses.

Invariant: it depends on logged events alone, in their order, so a replay derives it again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from asyncrl.engine.events.types import (
    ActorRestarted,
    AnyEvent,
    CollectorJoined,
    CollectorLeaving,
    CollectorLeft,
    Dispatched,
    OwnerDead,
    Put,
    Settled,
)
from asyncrl.engine.records.fate import CANCELLED, RECALLED, dropped

REMEMBERED_GROUPS = 16
"""The mean of a collector is over this many groups. Fewer would follow its pace sooner, and swing with long groups."""

TRIED_AGAIN_AFTER = 16
"""A collector without a grant for this many times its own seconds per group gets one group, as a new try."""

LATE_AFTER = 2
"""A collector is late if it brought no group in this many times the seconds of the longest group of the others."""


@dataclass(eq=False, slots=True)
class _Pace:
    """What is known of one collector. `began` has, by group in flight, when it began and how many were in flight then.

    `brought` counts groups put. `in_vain` is for how many seconds it had groups that were then taken from it, because
    it had brought none.
    """

    granted: int = 0
    began: dict[int, tuple[float, int]] = field(default_factory=dict)
    last_grant: float = 0.0
    measured: int = 0
    seconds: float = 0.0
    load: float = 1.0
    tried_again: bool = False
    brought: int = 0
    in_vain: float = 0.0

    @property
    def oldest(self) -> float:
        """When the oldest group in flight began; groups begin in order."""
        return next(iter(self.began.values()), (math.inf, 0))[0]

    def measure(self, seconds: float, load: int) -> None:
        if self.tried_again:
            self.tried_again, self.measured = False, 0
        self.measured = min(self.measured + 1, REMEMBERED_GROUPS)
        self.seconds += (seconds - self.seconds) / self.measured
        self.load += (load - self.load) / self.measured


class Balance:
    """Chooses among collectors by name. With `exact`, for runs that must repeat exactly, it takes turns."""

    kinds = (Dispatched, Put, Settled, OwnerDead, ActorRestarted, CollectorJoined, CollectorLeaving, CollectorLeft)

    def __init__(self, collectors: Iterable[str], *, exact: bool) -> None:
        self._paces = {name: _Pace() for name in sorted(collectors)}
        self._exact = exact
        self._gone: set[str] = set()
        self._place: dict[int, str] = {}
        self._now = 0.0
        # Expected seconds of each collector, best first. A heap, because many groups may be granted at once.
        self._ranked: list[tuple[float, int, str]] = []
        self._fastest = 0.0
        self._unproven = set(self._paces)
        self._most_brought = 0
        self._longest = 0.0

    def apply(self, event: AnyEvent) -> None:
        self._now = event.t
        match event:
            case Dispatched():
                self._begin(event)
            case Put():
                self._ranked.clear()
                self._bring(event.group)
            case Settled():
                self._ranked.clear()
                self._end(event)
            case OwnerDead() if event.replaced and event.owner in self._paces:
                self._leave(event.owner)
            case ActorRestarted() if event.actor in self._gone:
                self._join(event.actor)
            case CollectorJoined():
                self._join(event.collector)
            case CollectorLeaving() if event.collector in self._paces:
                self._leave(event.collector)
            case CollectorLeft():
                self._gone.discard(event.collector)

    @property
    def any_left(self) -> bool:
        """Whether there is a collector to choose."""
        return bool(self._paces)

    def choose(self) -> str:
        """Return the collector that should get the next group; ties go to the least in flight, then by name."""
        if self._exact:
            return min(self._paces, key=lambda name: self._paces[name].granted)
        if not self._ranked:
            self._fastest = min((pace.seconds for pace in self._paces.values() if pace.measured), default=0.0)
            self._ranked = [(*self._expected(pace), name) for name, pace in self._paces.items()]
            heapify(self._ranked)
        return self._ranked[0][-1]

    def turns(self) -> dict[str, int]:
        """Return how many groups each collector was granted, for `restore`."""
        return {name: pace.granted for name, pace in self._paces.items()}

    def restore(self, turns: Mapping[str, int]) -> None:
        """Go on with the turns of a checkpoint. The paces of its processes say nothing of those of today.

        Other collectors than those of then begin anew: a new one would get all grants until it had as many.
        """
        if turns.keys() == self._paces.keys():
            for name, granted in turns.items():
                self._paces[name].granted = granted

    def late(self) -> dict[str, tuple[float, list[int]]]:
        """Return, per collector that has brought no group yet, when it is late in the log's time, and what it has.

        A collector cannot be late before another one has brought as many groups as it has in flight.

        Example: one collector brought its groups within 1 s. Another one, granted groups at 0 s, is late at 2 s, and
        its groups are recalled. It gets one group after 16 · 4 s, and is late again 4 s later.
        """
        if self._exact:
            return {}
        found = {}
        for name in self._unproven:
            pace = self._paces[name]
            # A single group may just be long, unless its collector was late before.
            fewest = 1 if pace.in_vain else 2
            if fewest <= len(pace.began) <= self._most_brought:
                found[name] = (pace.oldest + LATE_AFTER * max(self._longest, pace.in_vain), sorted(pace.began))
        return found

    def _expected(self, pace: _Pace) -> tuple[float, int]:
        """Return the seconds after which one more group is expected from a collector, and what it has in flight."""
        in_flight = len(pace.began)
        if not pace.measured:
            if pace.in_vain:
                return (0.0, 0) if self._is_forgotten(pace) else (math.inf, in_flight)
            # Its first group takes at least as long as it has been in flight; more is not known.
            return max(self._fastest, self._now - min(pace.oldest, self._now)) * (1 + in_flight) / 2, in_flight
        if self._is_forgotten(pace):
            return 0.0, 0
        return pace.seconds * (1 + (in_flight + 1) / pace.load) / 2, in_flight

    def _is_forgotten(self, pace: _Pace) -> bool:
        # So a collector that brings nothing waits longer after each try.
        known_s = pace.seconds if pace.measured else LATE_AFTER * pace.in_vain
        return known_s > 0 and not pace.began and self._now - pace.last_grant >= TRIED_AGAIN_AFTER * known_s

    def _begin(self, event: Dispatched) -> None:
        if event.collector not in self._paces:
            self._paces[event.collector] = _Pace()
            self._unproven.add(event.collector)
        pace = self._paces[event.collector]
        pace.tried_again = pace.tried_again or self._is_forgotten(pace)
        pace.granted += 1
        pace.last_grant = self._now
        pace.began[event.group] = (self._now, len(pace.began) + 1)
        self._place[event.group] = event.collector
        if self._ranked and self._ranked[0][-1] == event.collector:
            heapreplace(self._ranked, (*self._expected(pace), event.collector))
        else:
            self._ranked.clear()

    def _leave(self, name: str) -> None:
        """Let go of a collector that died, or is to leave, with what it had in flight.

        How its groups end says nothing of a pace.
        """
        del self._paces[name]
        self._gone.add(name)
        self._unproven.discard(name)
        self._place = {group: place for group, place in self._place.items() if place != name}
        self._ranked.clear()

    def _join(self, name: str) -> None:
        """Take up a successor or a newcomer, of which nothing is known; its turns begin with those of the others."""
        granted = max((pace.granted for pace in self._paces.values()), default=0)
        self._paces[name] = _Pace(granted)
        self._gone.discard(name)
        self._unproven.add(name)
        self._ranked.clear()

    def _bring(self, group: int) -> None:
        if group in self._place:
            self._unproven.discard(self._place[group])
            pace, seconds, load = self._take(group)
            pace.measure(seconds, load)
            pace.brought += 1
            self._most_brought = max(self._most_brought, pace.brought)
            self._longest = max(self._longest, seconds)

    def _end(self, event: Settled) -> None:
        """Note a group that was not put. A failed one does not tell how long groups take."""
        if event.group not in self._place:
            return
        pace, seconds, load = self._take(event.group)
        if dropped(CANCELLED) in event.fates or dropped(RECALLED) in event.fates:
            if pace.measured:
                pace.measure(seconds, load)
            else:
                pace.in_vain = max(pace.in_vain, seconds)

    def _take(self, group: int) -> tuple[_Pace, float, int]:
        """Remove a group from those in flight; return its collector's pace, its seconds and the load beside it."""
        pace = self._paces[self._place.pop(group)]
        load_at_end = len(pace.began)
        since, load = pace.began.pop(group)
        return pace, self._now - since, max(load, load_at_end)
