"""Compares the events that a replay derives with those of the log, and describes the first difference.

An event is *derived* if it follows from the events before it: verdicts, batches and when they can be taken, plans, the
work of the ranks, steps and fates. Times, metrics of the ranks and event numbers are not derived.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.engine.events.types import (
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    BatchTaken,
    Judged,
    Planned,
    Put,
    Settled,
    StepEnded,
    StepStarted,
    WorkGiven,
)

_NAMED_BY: Mapping[type, tuple[str, ...]] = {
    Put: ("group",),
    Judged: ("batch", "group"),
    BatchJudged: ("batch",),
    BatchTaken: ("batch",),
    BatchGivenUp: ("batch",),
    Planned: ("step",),
    StepStarted: ("step",),
    WorkGiven: ("step", "stage"),
    StepEnded: ("step",),
    Settled: ("group",),
}
DERIVED = tuple(_NAMED_BY)
"""The types of the events that a replay derives, and compares."""
_TIMES = {"seq", "t", "wall"}
_NOT_DERIVED: Mapping[type, set[str]] = {
    StepEnded: {"seconds", "metrics", "rank_seconds", "predicted_seconds"},
    Put: {"group", "keys", "tags"},
}
_LACKING = {"digest", "updates", "filler_places"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event of the log that the replay does not repeat. `seq` is its number; 0: after the last event."""

    seq: int
    event: str
    why: str

    def __str__(self) -> str:
        where = f"event {self.seq}" if self.seq else "after the last event"
        return f"{where}, {self.event}: {self.why}"


def identity(event: AnyEvent) -> Hashable:
    """Return what identifies a derived event, apart from its content; None if the event is not derived."""
    names = _NAMED_BY.get(type(event))
    return names and (type(event), *(getattr(event, name) for name in names))


def title(event: AnyEvent) -> str:
    """Name an event in words: `judged group 7 batch 2`."""
    words = [str(event.__struct_config__.tag)]
    words += [f"{name} {getattr(event, name)}" for name in ("group", "batch", "step") if hasattr(event, name)]
    return " ".join(words)


def differences(recorded: AnyEvent, replayed: AnyEvent) -> list[str]:
    """Describe the fields in which two events of one type differ. A field that an old log lacks does not count."""
    passed = _TIMES | _NOT_DERIVED.get(type(recorded), set())
    before, after = msgspec.to_builtins(recorded), msgspec.to_builtins(replayed)
    out = []
    for name in (name for name in before if name not in passed):
        if name in _LACKING and before[name] in (None, (), []):
            continue
        if before[name] != after.get(name):
            out.append(f"{name} is {_short(before[name], after.get(name))}")
    return out


def _short(before: Any, after: Any) -> str:
    """Describe two values; of long lists and maps, only the first place where they differ."""
    if isinstance(before, list) and isinstance(after, list) and len(str(before)) + len(str(after)) > 120:
        at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            return f"{len(before)} long in the log, {len(after)} in the replay"
        return f"at place {at} {_short(before[at], after[at])}"
    if isinstance(before, dict) and isinstance(after, dict) and len(str(before)) + len(str(after)) > 120:
        at = next(key for key in sorted({*before, *after}, key=str) if before.get(key) != after.get(key))
        return f"at {at!r} {_short(before.get(at), after.get(at))}"
    return f"{before!r} in the log, {after!r} in the replay"


class Produced:
    """A fold that keeps derived events by identity until they are compared with those of the log."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self._waiting: defaultdict[Hashable, list[AnyEvent]] = defaultdict(list)
        self._last: dict[Hashable, AnyEvent] = {}

    def apply(self, event: AnyEvent) -> None:
        self.events.append(event)
        name = identity(event)
        if name is not None:
            self._waiting[name].append(event)

    def settled(self, group: int) -> bool:
        """Whether the replay has settled a group."""
        name = (Settled, group)
        return name in self._waiting or name in self._last

    def compare(self, recorded: AnyEvent) -> Difference | None:
        """Compare a derived event of the log with the replay's; None if they are equal."""
        name = identity(recorded)
        queue = self._waiting.get(name)
        if not queue:
            return Difference(recorded.seq, title(recorded), self._missing(recorded, name))
        replayed = queue.pop(0)
        if not queue:
            del self._waiting[name]
        self._last[name] = replayed
        found = differences(recorded, replayed)
        if not found:
            return None
        if isinstance(recorded, Put):
            why = "its tags were changed after the put: their digest differs from the recorded one"
            return Difference(recorded.seq, title(recorded), why)
        return Difference(recorded.seq, title(recorded), "; ".join(found))

    def forget(self) -> None:
        """Remove the events that the log does not have yet."""
        void = {event.seq for queue in self._waiting.values() for event in queue}
        self.events[:] = [event for event in self.events if event.seq not in void]
        self._waiting.clear()

    def rest(self, kinds: tuple[type, ...]) -> AnyEvent | None:
        """Return the first event of these types that the log never had; None without one."""
        left = [event for queue in self._waiting.values() for event in queue if isinstance(event, kinds)]
        return min(left, key=lambda event: event.seq, default=None)

    def _missing(self, recorded: AnyEvent, name: Hashable) -> str:
        if name in self._last:
            return "it stands twice in the log; the replay says it once"
        alike = [event for queue in self._waiting.values() for event in queue if type(event) is type(recorded)]
        if alike:
            return f"the replay does not say it; it says {title(alike[0])} instead"
        return "the replay does not say it"
