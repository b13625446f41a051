"""The ledger: places, fates, conservation, and the moves that it refuses."""

import pytest

from asyncrl.engine.events.ledger import Ledger, Place
from asyncrl.engine.events.types import (
    AnyEvent,
    Claimed,
    Dispatched,
    GroupFailed,
    Judged,
    Put,
    Released,
    Settled,
    StepStarted,
)


def dispatched(group: int = 0, size: int = 2) -> Dispatched:
    return Dispatched(group=group, prompt=group, dataset="d", size=size, collector="c")


def put(group: int = 0) -> Put:
    return Put(group=group, keys=[], tags={})


def claimed(*groups: int) -> Claimed:
    return Claimed(claim="c", fence=1, groups=list(groups))


def started(*groups: int) -> StepStarted:
    return StepStarted(step=1, version=0, groups=list(groups))


def settled(group: int, *fates: str) -> Settled:
    return Settled(group=group, fates=list(fates))


def fold(*events: AnyEvent) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
        assert ledger.balanced
    return ledger


LIFE: list[AnyEvent] = [dispatched(), put(), claimed(0), started(0)]


def test_a_group_goes_through_its_places_one_by_one() -> None:
    for stage, place in enumerate(Place, start=1):
        ledger = fold(*LIFE[:stage])
        assert {where: ledger.count(where) for where in Place if ledger.count(where)} == {place: 2}
        assert ledger.unsettled == [0]


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_group_may_settle_at_any_place(stage: int) -> None:
    ledger = fold(*LIFE[:stage], settled(0, "dropped:run_ended", "failed:score_error"))
    assert ledger.unsettled == []
    assert ledger.by_reason("dropped") == {"run_ended": 1}
    assert ledger.by_reason("failed") == {"score_error": 1}


def test_the_summary_has_stable_keys_and_counts_by_reason_sorted() -> None:
    other: list[AnyEvent] = [
        dispatched(1, 3),
        put(1),
        claimed(1),
        settled(1, "dropped:stale", "dropped:a", "dropped:stale"),
    ]
    ledger = fold(*LIFE, *other, dispatched(2, 5), settled(0, "trained", "masked:long"))
    assert ledger.summary() == {
        "dispatched": 10,
        "trained": 1,
        "masked": {"long": 1},
        "dropped": {"a": 1, "stale": 2},
        "failed": {},
        "in_flight": 5,
        "buffered": 0,
        "claimed": 0,
        "in_training": 0,
    }
    assert list(ledger.summary()["dropped"]) == ["a", "stale"]


def test_a_reason_with_a_colon_stays_whole() -> None:
    assert fold(dispatched(0, 1), settled(0, "dropped:my:reason")).by_reason("dropped") == {"my:reason": 1}


DONE = settled(0, "dropped:x", "dropped:x")


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([dispatched(), dispatched()], id="dispatched twice"),
        pytest.param([put()], id="put without dispatch"),
        pytest.param([dispatched(), put(), put()], id="put twice"),
        pytest.param([dispatched(), claimed(0)], id="claimed before its put is logged"),
        pytest.param([dispatched(), put(), claimed(0), claimed(0)], id="claimed twice"),
        pytest.param([dispatched(), put(), claimed(0), put()], id="back to buffered"),
        pytest.param([dispatched(), put(), started(0)], id="trained on without a claim"),
        pytest.param([*LIFE, started(0)], id="in two steps"),
        pytest.param([*LIFE, claimed(0)], id="claimed in training"),
        pytest.param([DONE], id="settled without dispatch"),
        pytest.param([dispatched(), DONE, DONE], id="settled twice"),
        pytest.param([dispatched(), DONE, put()], id="put after its fate"),
        pytest.param([dispatched(), DONE, started(0)], id="trained after its fate"),
        pytest.param([dispatched(), settled(0, "dropped:x")], id="a fate too few"),
        pytest.param([dispatched(), settled(0, *["dropped:x"] * 3)], id="a fate too many"),
        pytest.param([dispatched(), put(), claimed(0), settled(0, "trained", "trained")], id="trained in no step"),
    ],
)
def test_an_impossible_move_is_refused(events: list[AnyEvent]) -> None:
    """Invariant 2: one fate, once."""
    fold(*events[:-1])
    with pytest.raises(ValueError, match="group 0"):
        fold(*events)


def test_events_that_move_nothing_change_nothing() -> None:
    before = fold(*LIFE).summary()
    more: list[AnyEvent] = [
        GroupFailed(group=0, reason="timeout", error=""),
        Judged(group=0, batch=0, age=0, dropped="stale", by="", masked={}),
        Released(groups=[0]),
    ]
    assert fold(*LIFE, *more).summary() == before
