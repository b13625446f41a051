"""Random schedules of time, failures and deaths through the real controller: every invariant, and no stall."""

import random
from dataclasses import replace

import pytest

from asyncrl.engine.events.types import Settled
from asyncrl.engine.testing.conformance.schedule import Schedule

PARTS = 5
"""Tests that share the schedules, so that two processes can."""


def run_schedules(numbers: range) -> None:
    steps = 0
    for number in numbers:
        run = Schedule.draw(random.Random(number)).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        steps += run.outcome.progress.steps
    assert steps > len(numbers), "the schedules train too little to show anything"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_an_invariant_or_stalls(schedules: int, part: int) -> None:
    """Invariants 1 to 10; a stall, no timer and nothing ready, is an error of virtual time itself."""
    run_schedules(range(part, schedules, PARTS))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_no_later_schedule_does(schedules: int) -> None:
    """As many again as plain pytest runs."""
    run_schedules(range(schedules, 2 * schedules))


@pytest.mark.timeout(600)
def test_nor_does_one_in_which_groups_of_a_slow_collector_are_recalled(schedules: int) -> None:
    """FOUND-C3: the invariants hold while groups are taken from one collector and issued again at another."""
    recalled = 0
    for number in range(schedules // 20):
        drawn = Schedule.draw(random.Random(number))
        slow = replace(drawn, collectors=2, slower=10.0, stale_mode="drop", epochs=4)
        run = replace(slow, staleness=max(1, slow.staleness), groups=max(2, slow.groups)).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        recalled += sum("dropped:recalled" in event.fates for event in run.outcome.of(Settled))
    assert recalled > schedules // 100, "too little is recalled to show anything"
