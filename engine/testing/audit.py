"""A run's events counted again, without the folds that the product itself uses.

What the invariants speak of (places and fates of samples, ages, run-ahead, publish lag) is
worked out here from the plain sequence of events, so that a test can hold the product to it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engine.events.ledger import Ledger, Place
from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    Claimed,
    Dispatched,
    OwnerDead,
    Planned,
    Put,
    Released,
    Settled,
    StepEnded,
    StepStarted,
    unwritten,
)


@dataclass(slots=True)
class Audit:
    """Figures of one run. Lists are in the order of events; ages and lags are in versions.

    `ages` has one entry per trained sample, `lags` one per step begun, `run_ahead` one per event.
    `faults` says in words what no sequence of events may hold; after one that is `broken` nothing is counted.
    """

    ages: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    run_ahead: list[int] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)
    served_at_put: dict[int, int] = field(default_factory=dict)
    fates: dict[int, list[str]] = field(default_factory=dict)
    tags: dict[int, dict[str, Any]] = field(default_factory=dict)
    trained_keys: dict[int, list[str]] = field(default_factory=dict)
    planned_keys: dict[int, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    broken: bool = False

    @classmethod
    def of(cls, events: Sequence[AnyEvent]) -> "Audit":
        """Count `events` from the first to the last."""
        audit, ledger, state = cls(), Ledger(), _State()
        for event in events:
            try:
                ledger.apply(event)
                audit._apply(event, state)
            except (KeyError, ValueError) as error:  # What comes after it means nothing.
                audit.faults.append(f"{error!r} at {event}")
                if isinstance(event, Settled) and event.group in audit.fates:
                    audit.faults.append(f"group {event.group} settled twice")
                audit.broken = True
                return audit
            audit._compare(event, ledger, state)
        audit.faults += [f"group {group} has no fate" for group in state.places]
        return audit

    def _apply(self, event: AnyEvent, state: "_State") -> None:
        match event:
            case Dispatched():
                state.sizes[event.group] = event.size
                state.places[event.group] = Place.IN_FLIGHT
                state.collectors[event.group] = event.collector
                state.out.add(event.group)
            case Put():
                self.tags[event.group] = unwritten(event.tags)
                self.born[event.group] = event.tags["version"]
                # Of one that died meanwhile nobody knows what it served.
                by = state.collectors[event.group]
                self.served_at_put[event.group] = event.tags["version"] if by in state.gone else state.served[by]
                state.keys[event.group] = event.keys
                state.places[event.group] = Place.BUFFERED
            case Claimed():
                state.places.update(dict.fromkeys(event.groups, Place.CLAIMED))
            case Planned():
                self.planned_keys[event.step] = sorted({k for rank in event.ranks for micro in rank for k in micro})
            case StepStarted():
                state.places.update(dict.fromkeys(event.groups, Place.IN_TRAINING))
                state.step_of.update(dict.fromkeys(event.groups, event))
                self.lags.append(event.version - min(state.served.values(), default=0))
                if event.version != state.version:
                    self.faults.append(f"step {event.step} began at version {event.version}, not {state.version}")
            case StepEnded():
                if event.version != state.version + 1:
                    self.faults.append(f"version went from {state.version} to {event.version}")
                state.version = event.version
            case Acknowledged() | OwnerDead():
                self._serve(event, state)
            case Released():
                self.faults += [f"capacity of {g} came back twice" for g in event.groups if g not in state.out]
                state.out.difference_update(event.groups)
            case Settled():
                self._settle(event, state)
        self.run_ahead.append(len(state.out))

    def _serve(self, event: Acknowledged | OwnerDead, state: "_State") -> None:
        if isinstance(event, OwnerDead):
            if event.replaced:
                state.gone.add(event.owner)
                state.served.pop(event.owner, None)
            return
        if not state.served[event.generator] <= event.version <= state.version:
            self.faults.append(f"{event.generator} served {event.version} at version {state.version}")
        state.served[event.generator] = event.version
        state.gone.discard(event.generator)

    def _settle(self, event: Settled, state: "_State") -> None:
        if state.places.pop(event.group, None) is None:
            self.faults.append(f"group {event.group} settled twice")
        self.fates[event.group] = event.fates
        state.settled.update(fate.partition(":")[0] for fate in event.fates)
        trained = [i for i, fate in enumerate(event.fates) if fate == "trained"]
        if trained:
            step = state.step_of[event.group]
            self.ages += [step.version - self.born[event.group]] * len(trained)
            self.trained_keys.setdefault(step.step, []).extend(state.keys[event.group][i] for i in trained)

    def _compare(self, event: AnyEvent, ledger: Ledger, state: "_State") -> None:
        counted: Counter[Place] = Counter()
        for group, place in state.places.items():
            counted[place] += state.sizes[group]
        mine = [sum(state.sizes.values()), *(counted[place] for place in Place), state.settled["trained"]]
        its = [ledger.dispatched, *(ledger.count(place) for place in Place), ledger.trained]
        if mine != its or not ledger.balanced:
            self.faults.append(f"the ledger says {its}, the events {mine}, at {event}")
        if sum(state.sizes.values()) != sum(counted.values()) + sum(state.settled.values()):
            self.faults.append(f"samples do not add up at {event}")


@dataclass(slots=True)
class _State:
    sizes: dict[int, int] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    collectors: dict[int, str] = field(default_factory=dict)
    keys: dict[int, list[str]] = field(default_factory=dict)
    step_of: dict[int, StepStarted] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    gone: set[str] = field(default_factory=set)
    settled: Counter[str] = field(default_factory=Counter)
    out: set[int] = field(default_factory=set)
    version: int = 0
