"""Random schedules of time, failures and deaths through the real controller: every invariant, and no stall."""

import math
import random
from dataclasses import replace

import pytest

from asyncrl.engine.events.types import ActorRestarted, CollectorJoined, CollectorLeft, Settled
from asyncrl.engine.testing.conformance.schedule import Schedule
from asyncrl.engine.testing.simulation import Nodes
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.replay import replay

PARTS = 5
"""Tests that share the schedules, so that two processes can. Plain pytest runs the first one's."""


def run_schedules(numbers: range) -> None:
    steps = 0
    for number in numbers:
        run = Schedule.draw(random.Random(number)).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        steps += run.outcome.progress.steps
    assert steps > len(numbers), "the schedules train too little to show anything"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_no_schedule_breaks_an_invariant_or_stalls(schedules: int, part: int) -> None:
    """Invariants 1 to 10; a stall, no timer and nothing ready, is an error of virtual time itself."""
    run_schedules(range(part, schedules, PARTS))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_no_later_schedule_does(schedules: int) -> None:
    """As many again as plain pytest runs."""
    run_schedules(range(schedules, 2 * schedules))


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nor_does_one_in_which_collectors_are_killed_and_replaced(schedules: int) -> None:
    """Killed or silent, with puts on their way: every sample has one fate, and the log replays."""
    restarts = lost = 0
    for number in range(schedules // 20):
        rng = random.Random(number)
        drawn = Schedule.draw(rng)
        run = replace(
            drawn,
            killed=f"collector{rng.randrange(drawn.collectors)}",
            killed_at=rng.choice([1.5, 3.0, 5.0, 8.0, 20.0]),
            dies_at=math.inf,
            steps=max(4, drawn.steps),
            prompts=max(6, drawn.prompts),
            epochs=3,
        ).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        assert replay(recording_of(run.outcome)).difference is None, f"schedule {number}: {run.schedule}"
        restarts += len(run.outcome.of(ActorRestarted))
        lost += sum("failed:collector_died" in event.fates for event in run.outcome.of(Settled))
    assert restarts > schedules // 100, "too few are replaced to show anything"
    assert lost > schedules // 100, "too little is lost to show anything"


def draw_nodes(rng: random.Random, collectors: int) -> Nodes:
    """Draw nodes that come, are drained, with time to finish or without, or are lost."""
    names = [f"collector{i}" for i in range(collectors + 2)]
    gone = rng.sample(names, rng.randint(1, len(names)))
    return Nodes(
        added_at=sorted(rng.choice([0.5, 2.0, 6.0, 15.0, 40.0]) for _ in range(rng.randint(1, 4))),
        start_s=rng.choice([0.1, 3.0, 9.0]),
        drained_at={
            name: (rng.choice([1.5, 4.0, 9.0, 25.0]), rng.choice([0.0, 11.0, 30.0, 200.0])) for name in gone[1:]
        },
        lost_at={gone[0]: rng.choice([3.0, 8.0, 20.0])} if rng.random() < 0.5 else {},
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nor_does_one_in_which_collectors_join_and_leave(schedules: int) -> None:
    """Finished, handed back, buried or lost with its node: every sample has one fate, and the log replays."""
    joined = left = recalled = 0
    for number in range(schedules // 20):
        rng = random.Random(number)
        drawn = Schedule.draw(rng)
        run = replace(
            drawn,
            staleness=max(1, drawn.staleness),
            collectors=2,
            killed=rng.choice(["collector0", "collector1", "collector2"]),
            killed_at=rng.choice([math.inf, math.inf, 5.0, 12.0]),
            restarts=3,
            dies_at=math.inf,
            rank_dies_at_step=0,
            bad_publishes=frozenset(),
            steps=max(6, drawn.steps),
            prompts=max(8, drawn.prompts),
            epochs=4,
            nodes=draw_nodes(rng, 2),
            most_collectors=rng.choice([2, 3, 4]),
        ).run()
        assert run.violations == [], f"schedule {number}: {run.schedule}"
        assert replay(recording_of(run.outcome)).difference is None, f"schedule {number}: {run.schedule}"
        joined += len(run.outcome.of(CollectorJoined))
        left += len(run.outcome.of(CollectorLeft))
        recalled += sum("dropped:recalled" in event.fates for event in run.outcome.of(Settled))
    assert joined > schedules // 100, "too few join to show anything"
    assert left > schedules // 100, "too few leave to show anything"
    assert recalled > schedules // 200, "too little is handed back to show anything"
