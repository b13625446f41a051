"""Folds that name the kinds of events they look at are given those, and what they name is all that they look at."""

import inspect
import re

import pytest

from asyncrl.engine.events.alarms import Alarms
from asyncrl.engine.events.bias_alarm import BiasAlarm
from asyncrl.engine.events.evaluations import Evaluations
from asyncrl.engine.events.learning import Learning
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.length_bias import LengthBias
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import AnyEvent, BatchTaken, Released, RunEnded, VersionSet


class Everything:
    def __init__(self) -> None:
        self.seen: list[AnyEvent] = []

    def apply(self, event: AnyEvent) -> None:
        self.seen.append(event)


class Some(Everything):
    kinds = (BatchTaken, RunEnded)


def test_a_fold_is_given_the_kinds_that_it_names_or_all() -> None:
    some, everything = Some(), Everything()
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, folds=[some, everything])
    events: list[AnyEvent] = [BatchTaken(batch=0), Released(groups=[]), VersionSet(version=1), BatchTaken(batch=1)]
    for event in [*events, RunEnded(code=0, reason="done")]:
        log.append(event)
    assert [event.seq for event in everything.seen] == [1, 2, 3, 4, 5]
    assert [event.seq for event in some.seen] == [1, 4, 5]


@pytest.mark.parametrize("fold", [Ledger, LengthBias, Learning, Alarms, Progress, BiasAlarm])
def test_the_kinds_of_a_fold_are_those_that_it_looks_at(fold: type) -> None:
    """By the text of `apply`: a case that is added to it and not to `kinds` would never be met in a run."""
    names = {kind.__name__: kind for kind in AnyEvent.__args__}
    looked_at = {names[word] for word in re.findall(r"\w+", inspect.getsource(fold.apply)) if word in names}  # type: ignore[attr-defined]
    if fold is Progress:
        looked_at |= {*LengthBias.kinds, *Alarms.kinds, *Evaluations.kinds}
    if fold is Alarms:
        looked_at |= set(Learning.kinds)
    assert looked_at == set(fold.kinds)  # type: ignore[attr-defined]
