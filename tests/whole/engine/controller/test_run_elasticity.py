"""Collectors join and leave while a run goes on: nothing is lost, every sample has one fate, and the log replays."""

from collections import Counter

import pytest

from asyncrl.engine.events.types import (
    ActorRestarted,
    CollectorJoined,
    CollectorLeaving,
    CollectorLeft,
    Dispatched,
    Judged,
    OwnerDead,
    Settled,
)
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Nodes, Outcome, Remote, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.replay import replay

PROMPTS = 60


def run(nodes: Nodes, *, collectors: int = 2, most: int = 3, seconds: float = 2.0, **remote: object) -> Outcome:
    config = simulated_config(
        run__steps=None,
        task__epochs=1,
        collector__count=collectors,
        cluster__max_collectors=most,
        filters=[],
        rollout__max_staleness=2,
        supervision__answer_timeout_s=5.0,
    )
    return simulate(
        config,
        task=FakeTask(PROMPTS),
        generators=[FakeGenerator(seconds=lambda call: seconds + call % 3) for _ in range(collectors)],
        remote=Remote(restart_s=4.0, nodes=nodes, **remote),  # type: ignore[arg-type]
    )


def check(outcome: Outcome) -> None:
    """The ledger is exact, each prompt was judged once, and the log replays."""
    recording = recording_of(outcome)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    assert prove(recording.events).faults() == []
    assert (outcome.audit.faults, outcome.keys_left) == ([], [])
    prompts = {event.group: event.prompt for event in outcome.of(Dispatched)}
    assert Counter(prompts[event.group] for event in outcome.of(Judged)) == Counter(range(PROMPTS))
    assert replay(recording).difference is None


def granted(outcome: Outcome, collector: str, since: float = 0.0) -> list[int]:
    return [event.group for event in outcome.of(Dispatched) if event.collector == collector and event.t > since]


def test_a_node_that_is_added_brings_a_collector() -> None:
    outcome = run(Nodes(added_at=[6.0]))
    [joined] = outcome.of(CollectorJoined)
    assert joined.collector == "collector2"
    assert 9.0 <= joined.t < 13.0  # It is seen within 2 s, and starts for 3.
    assert len(granted(outcome, "collector2")) > 5
    assert min(event.t for event in outcome.of(Dispatched) if event.collector == "collector2") >= joined.t
    check(outcome)


def test_of_many_nodes_as_many_are_used_as_configured() -> None:
    outcome = run(Nodes(added_at=[1.0, 1.0, 2.0, 3.0, 4.0]), collectors=1, most=3)
    assert [event.collector for event in outcome.of(CollectorJoined)] == ["collector1", "collector2"]
    check(outcome)


def test_a_collector_whose_node_is_drained_finishes_what_it_has_and_leaves() -> None:
    outcome = run(Nodes(drained_at={"collector0": (6.0, 60.0)}))
    [leaving], [left] = outcome.of(CollectorLeaving), outcome.of(CollectorLeft)
    assert (leaving.collector, left.collector) == ("collector0", "collector0")
    assert leaving.seconds == pytest.approx(50.0, abs=2.0)
    assert left.t < 20.0
    assert granted(outcome, "collector0", since=leaving.t) == []
    # Finished, and not handed back: nothing is made twice.
    assert [event for event in outcome.of(Dispatched) if event.retry_of is not None] == []
    assert outcome.of(OwnerDead) == []
    check(outcome)


def test_what_it_cannot_finish_in_time_it_hands_back() -> None:
    outcome = run(Nodes(drained_at={"collector0": (6.0, 10.5)}), seconds=30.0)
    [left] = outcome.of(CollectorLeft)
    assert left.t < 17.0
    recalled = {event.group for event in outcome.of(Settled) if "dropped:recalled" in event.fates}
    assert recalled == {event.retry_of for event in outcome.of(Dispatched) if event.retry_of is not None} != set()
    assert outcome.of(OwnerDead) == []
    check(outcome)


def test_what_hangs_while_it_is_to_leave_is_buried_and_none_comes_in_its_place() -> None:
    outcome = run(
        Nodes(drained_at={"collector0": (6.0, 100.0)}), killed_at={"collector0": [6.5]}, hangs=True, seconds=4.0
    )
    assert [event.owner for event in outcome.of(OwnerDead)] == ["collector0"]
    assert outcome.of(ActorRestarted) == []
    assert [event.collector for event in outcome.of(CollectorLeft)] == ["collector0"]
    check(outcome)


def test_a_collector_that_is_lost_with_its_node_leaves_and_the_run_goes_on() -> None:
    outcome = run(Nodes(lost_at={"collector0": 6.0}))
    [death], [left] = outcome.of(OwnerDead), outcome.of(CollectorLeft)
    assert (death.owner, death.replaced, left.collector) == ("collector0", True, "collector0")
    assert outcome.of(ActorRestarted) == []
    lost = {event.group for event in outcome.of(Settled) if "failed:collector_died" in event.fates}
    assert lost == {event.retry_of for event in outcome.of(Dispatched) if event.retry_of is not None} != set()
    check(outcome)


def test_the_last_collector_may_leave_and_another_one_comes() -> None:
    outcome = run(Nodes(added_at=[30.0], drained_at={"collector0": (6.0, 20.0)}), collectors=1, most=1)
    [left], [joined] = outcome.of(CollectorLeft), outcome.of(CollectorJoined)
    assert left.t < 26.0 < joined.t
    assert granted(outcome, "collector1")
    check(outcome)


def test_a_newcomer_that_dies_is_replaced_like_any_other() -> None:
    outcome = run(Nodes(added_at=[1.0]), killed_at={"collector2": [15.0]})
    assert [event.actor for event in outcome.of(ActorRestarted)] == ["collector2"]
    check(outcome)


def test_a_newcomer_that_dies_before_it_takes_part_joins_at_the_second_try() -> None:
    outcome = run(Nodes(added_at=[1.0], start_s=3.0), killed_at={"collector2": [5.05]})
    assert [event.collector for event in outcome.of(CollectorJoined)] == ["collector2"]
    check(outcome)
