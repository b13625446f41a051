"""Random schedules of time, failures and deaths through the real controller: every invariant, and no stall."""

import random

import pytest

from asyncrl.engine.testing.conformance.schedule import Schedule


@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant_or_stalls(schedules: int) -> None:
    """Invariants 1 to 10; a stall, no timer and nothing ready, is an error of virtual time itself."""
    steps = 0
    for number in range(schedules):
        run = Schedule.draw(random.Random(number)).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        steps += run.outcome.progress.steps
    assert steps > schedules, "the schedules train too little to show anything"
