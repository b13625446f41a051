"""The balance: which collector gets the next group. A fold over the event log, so a log says what it chose, and why.

Each group goes where it is expected to arrive first. What is expected of a collector is the mean time from the
dispatch to the put of its last groups, times (1 + load / usual load) / 2: half of a group's time is its own, half
grows with what the collector has in flight. So equal collectors have equally much in flight, and a slow one gets a
group only while the others have so much that theirs would take as long.

Example: groups of one collector take 1 s, of the other 10 s, with 4 in flight at each. The slow one, with none left
in flight, is expected to take (1 + 1/4) / 2 · 10 s = 6.25 s; the quick one takes that long with 46 in flight. Nothing
is known of a collector until its first group arrives: a slow one has its equal share of the first grants, once.

Invariant: it depends on logged events alone, in their order, so a replay derives it again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.engine.events.types import AnyEvent, Dispatched, Put, Settled
from asyncrl.engine.records.fate import CANCELLED, dropped

REMEMBERED_GROUPS = 16
"""Groups of whose times a collector's mean is made; fewer follow its pace sooner and swing with every long group."""

TRIED_AGAIN_AFTER = 16
"""A collector that got nothing for so many of its own times gets one group, to see whether it is still as slow."""


@dataclass(eq=False, slots=True)
class _Pace:
    """What is known of one collector. `began` is by group in flight: when, with how many in flight, itself included."""

    granted: int = 0
    began: dict[int, tuple[float, int]] = field(default_factory=dict)
    last_grant: float = 0.0
    measured: int = 0
    seconds: float = 0.0
    load: float = 1.0
    tried_again: bool = False

    def measure(self, seconds: float, load: int) -> None:
        if self.tried_again:
            self.tried_again, self.measured = False, 0
        self.measured = min(self.measured + 1, REMEMBERED_GROUPS)
        self.seconds += (seconds - self.seconds) / self.measured
        self.load += (load - self.load) / self.measured


class Balance:
    """Chooses among collectors by name. With `exact`, for runs to be repeated exactly, time has no say: by turns."""

    kinds = (Dispatched, Put, Settled)

    def __init__(self, collectors: Iterable[str], *, exact: bool) -> None:
        self._paces = {name: _Pace() for name in sorted(collectors)}
        self._exact = exact
        self._place: dict[int, str] = {}
        self._now = 0.0

    def apply(self, event: AnyEvent) -> None:
        self._now = event.t
        match event:
            case Dispatched():
                self._begin(event)
            case Put():
                self._end(event.group, measured=True)
            case Settled():
                # A group that was cancelled took too long; one that failed says nothing of the time that groups take.
                self._end(event.group, measured=dropped(CANCELLED) in event.fates)

    def choose(self) -> str:
        """Return the collector that should get the next group; of equals the one with least in flight, by name."""
        if self._exact:
            return min(self._paces, key=lambda name: self._paces[name].granted)
        fastest = min((pace.seconds for pace in self._paces.values() if pace.measured), default=0.0)
        return min(self._paces, key=lambda name: self._expected(self._paces[name], fastest))

    def _expected(self, pace: _Pace, fastest: float) -> tuple[float, int]:
        """Return the seconds after which one more group is expected from a collector, and what it has in flight."""
        in_flight = len(pace.began)
        if not pace.measured:
            # Nothing is known but that its first group takes as long as it has been in flight.
            oldest = min((since for since, _ in pace.began.values()), default=self._now)
            return max(fastest, self._now - oldest) * (1 + in_flight) / 2, in_flight
        if self._is_forgotten(pace):
            return 0.0, 0
        return pace.seconds * (1 + (in_flight + 1) / pace.load) / 2, in_flight

    def _is_forgotten(self, pace: _Pace) -> bool:
        waited_s = self._now - pace.last_grant
        return bool(pace.measured) and not pace.began and waited_s >= TRIED_AGAIN_AFTER * pace.seconds

    def _begin(self, event: Dispatched) -> None:
        pace = self._paces.setdefault(event.collector, _Pace())
        pace.tried_again = pace.tried_again or self._is_forgotten(pace)
        pace.granted += 1
        pace.last_grant = self._now
        pace.began[event.group] = (self._now, len(pace.began) + 1)
        self._place[event.group] = event.collector

    def _end(self, group: int, *, measured: bool) -> None:
        name = self._place.pop(group, None)
        if name is None:
            return
        pace = self._paces[name]
        load_at_end = len(pace.began)
        since, load = pace.began.pop(group)
        if measured:
            pace.measure(self._now - since, max(load, load_at_end))
