"""The ledger: where every sample is, and that each gets exactly one fate. A fold over the event log.

Invariant: dispatched = trained + masked + dropped + failed + in flight + buffered + claimed + in training, after every
event.
"""

from collections import Counter
from enum import StrEnum
from typing import Any

from asyncrl.engine.events.types import (
    AnyEvent,
    Claimed,
    ClaimReturned,
    Dispatched,
    OwnerDead,
    Put,
    Settled,
    StepStarted,
)
from asyncrl.engine.records.fate import DROPPED, FAILED_FATE, MASKED, TRAINED, split_fate


class Place(StrEnum):
    """Where an unsettled group is. A group goes through these in order, and may settle at any of them."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    CLAIMED = "claimed"
    IN_TRAINING = "in_training"


_BEFORE = {Place.BUFFERED: Place.IN_FLIGHT, Place.CLAIMED: Place.BUFFERED, Place.IN_TRAINING: Place.CLAIMED}


class Ledger:
    """Counts samples by place and by fate. ValueError if an event breaks the order of a group's life."""

    kinds = (Dispatched, Put, Claimed, ClaimReturned, OwnerDead, StepStarted, Settled)

    def __init__(self) -> None:
        self.dispatched = 0
        self.fates: Counter[str] = Counter()
        self._groups: dict[int, tuple[Place, int]] = {}

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Dispatched():
                if event.group in self._groups:
                    raise ValueError(f"group {event.group} was dispatched twice")
                self.dispatched += event.size
                self._groups[event.group] = (Place.IN_FLIGHT, event.size)
            case Put():
                self._move(event.group, Place.BUFFERED)
            case Claimed():
                for group in event.groups:
                    self._move(group, Place.CLAIMED)
            case ClaimReturned() | OwnerDead():
                for group in event.groups:
                    self._return(group)
            case StepStarted():
                for group in event.groups:
                    self._move(group, Place.IN_TRAINING)
            case Settled():
                where, size = self._known(event.group)
                if len(event.fates) != size:
                    raise ValueError(f"group {event.group} has {size} samples and settled {len(event.fates)}")
                if TRAINED in event.fates and where is not Place.IN_TRAINING:
                    raise ValueError(f"group {event.group} cannot be trained: it is {where}")
                del self._groups[event.group]
                self.fates.update(event.fates)

    def count(self, place: Place) -> int:
        """Return the number of samples at a place."""
        return sum(size for where, size in self._groups.values() if where is place)

    @property
    def trained(self) -> int:
        return self.fates[TRAINED]

    def by_reason(self, kind: str) -> dict[str, int]:
        """Return the number of samples by reason, for `kind` masked, dropped or failed."""
        split = ((split_fate(fate), count) for fate, count in self.fates.items())
        return {reason: count for (this, reason), count in sorted(split) if this == kind}

    @property
    def unsettled(self) -> list[int]:
        """The groups that have not settled."""
        return sorted(self._groups)

    @property
    def balanced(self) -> bool:
        """Whether every dispatched sample has one place or one fate."""
        return self.dispatched == sum(self.fates.values()) + sum(size for _, size in self._groups.values())

    def summary(self) -> dict[str, Any]:
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "masked": self.by_reason(MASKED),
            "dropped": self.by_reason(DROPPED),
            "failed": self.by_reason(FAILED_FATE),
            **{place.value: self.count(place) for place in Place},
        }

    def _known(self, group: int) -> tuple[Place, int]:
        if group not in self._groups:
            raise ValueError(f"group {group} is unknown, or has already settled")
        return self._groups[group]

    def _return(self, group: int) -> None:
        where, size = self._known(group)
        if where is not Place.CLAIMED:
            raise ValueError(f"group {group} cannot become ready again: it is {where}")
        self._groups[group] = (Place.BUFFERED, size)

    def _move(self, group: int, place: Place) -> None:
        where, size = self._known(group)
        if _BEFORE[place] is not where:
            raise ValueError(f"group {group} cannot go from {where} to {place}")
        self._groups[group] = (place, size)
