"""Figures from events, by hand."""

import pytest

from asyncrl.engine.events.types import (
    AnyEvent,
    Claimed,
    ClaimReturned,
    Dispatched,
    OwnerDead,
    Put,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.simulate.timeline import Timeline


def step(number: int, t: float, seconds: float) -> list[AnyEvent]:
    ended = StepEnded(
        t=t,
        step=number,
        version=number,
        seconds=seconds,
        ages={"0": 1},
        samples=1,
        tokens=5,
        reward_sum=0.0,
        metrics={},
    )
    return [StepStarted(t=t - seconds, step=number, version=number - 1, groups=[0]), ended]


def summary(*events: AnyEvent) -> dict[str, object]:
    figures = Timeline()
    for event in events:
        figures.apply(event)
    return figures.summary()


def test_groups_whose_claim_ended_wait_in_the_buffer_again() -> None:
    """Buffered from 1 to 2, claimed until 4 and given back; claimed from 5 to 7, its owner dead; claimed at 9."""
    figures = summary(
        Dispatched(t=0.0, group=0, prompt=0, dataset="d", size=1, collector="c"),
        Put(t=1.0, group=0, keys=[], tags={"response_tokens": [5]}),
        Claimed(t=2.0, claim="a/0", fence=1, groups=[0]),
        ClaimReturned(t=4.0, groups=[0]),
        Claimed(t=5.0, claim="a/1", fence=2, groups=[0]),
        OwnerDead(t=7.0, owner="a", groups=[0]),
        Claimed(t=9.0, claim="b/0", fence=3, groups=[0]),
        *step(1, 10.0, 1.0),
        Settled(t=10.0, group=0, fates=["trained"]),
    )
    assert (figures["buffer_mean"], figures["buffer_max"]) == ((1 + 1 + 2) / 10, 1)


def test_the_median_step_is_not_moved_by_a_slow_first_one() -> None:
    first = Dispatched(t=0.0, group=0, prompt=0, dataset="d", size=1, collector="c")
    steps = [event for n in range(1, 6) for event in step(n, 20.0 + n, 1.0)]
    steps[1:2] = step(1, 20.5, 20.0)[1:]
    figures = summary(first, *steps)
    assert (figures["step_seconds_median"], figures["step_seconds"]) == (1.0, 4.8)


def test_a_cycle_is_what_steps_take_from_end_to_end_after_the_start() -> None:
    """Ends at 50, 60, 62, 63, 64.5 and 67: of the cycles 10, 2, 1, 1.5 and 2.5 the last three count."""
    first = Dispatched(t=0.0, group=0, prompt=0, dataset="d", size=1, collector="c")
    steps = [event for n, end in enumerate((50.0, 60.0, 62.0, 63.0, 64.5, 67.0), 1) for event in step(n, end, 1.0)]
    assert summary(first, *steps)["cycle_seconds"] == pytest.approx(5 / 3, abs=1e-5)
    assert summary(first, *step(1, 50.0, 1.0))["cycle_seconds"] == 50.0
