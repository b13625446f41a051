"""The proof that every sample of a run has one fate, or the names of those that do not.

It reads the plain sequence of events and trusts none of the run's own folds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.engine.events.types import AnyEvent, Dispatched, Put, RunEnded, Settled, StepStarted
from asyncrl.engine.records.fate import DROPPED, FAILED_FATE, MASKED, TRAINED, split_fate

_KINDS = (MASKED, DROPPED, FAILED_FATE)


@dataclass(slots=True)
class _Sent:
    seq: int
    size: int
    keys: list[str] = field(default_factory=list)
    settled: int = 0
    in_step: int = 0


class Conservation:
    """A fold; `faults` is complete once the last event is in."""

    def __init__(self) -> None:
        self.fates: Counter[str] = Counter()
        self._sent: dict[int, _Sent] = {}
        self._faults: list[str] = []
        self.ended = False

    @property
    def samples(self) -> int:
        return sum(sent.size for sent in self._sent.values())

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Dispatched() if event.group in self._sent:
                self._faults.append(f"group {event.group} was dispatched twice, by events {self._seqs(event)}")
            case Dispatched():
                self._sent[event.group] = _Sent(event.seq, event.size)
            case Put() | StepStarted() | Settled():
                self._follow(event)
            case RunEnded():
                self.ended = True

    def _follow(self, event: Put | StepStarted | Settled) -> None:
        for group in event.groups if isinstance(event, StepStarted) else [event.group]:
            sent = self._sent.get(group)
            if sent is None:
                self._faults.append(f"group {group} of event {event.seq} was never dispatched")
                continue
            match event:
                case Put():
                    sent.keys = event.keys
                case StepStarted():
                    sent.in_step = event.step
                case Settled():
                    self._settle(event, sent)

    def _settle(self, event: Settled, sent: _Sent) -> None:
        if sent.settled:
            self._faults.append(f"{self._named(event.group)}: two fates, by events {sent.settled} and {event.seq}")
            return
        sent.settled = event.seq
        if len(event.fates) != sent.size:
            self._faults.append(f"{self._named(event.group)}: {len(event.fates)} fates for {sent.size} samples")
        for index, fate in enumerate(event.fates):
            kind, reason = split_fate(fate)
            if fate != TRAINED and (kind not in _KINDS or not reason):
                self._faults.append(f"{self._named(event.group)}: sample {index} has the fate {fate!r}, which is none")
            if fate == TRAINED and not sent.in_step:
                self._faults.append(f"{self._named(event.group)}: sample {index} was trained in no step")
        self.fates.update(event.fates)

    def faults(self) -> list[str]:
        """Name the groups, and their samples, that have no fate, two, or an impossible one."""
        open_ = [
            f"{self._named(group)}: no fate; dispatched by event {sent.seq}"
            for group, sent in self._sent.items()
            if not sent.settled
        ]
        return [*self._faults, *open_]

    def _named(self, group: int) -> str:
        sent = self._sent[group]
        keys = f"{sent.keys[0]} to {sent.keys[-1]}" if sent.keys else f"{sent.size} samples without a put"
        return f"group {group} ({keys})"

    def _seqs(self, event: Dispatched) -> str:
        return f"{self._sent[event.group].seq} and {event.seq}"


def prove(events: Iterable[AnyEvent]) -> Conservation:
    """Fold events into a Conservation."""
    proof = Conservation()
    for event in events:
        proof.apply(event)
    return proof
