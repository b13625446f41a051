"""Calls that go on when their caller gives up, answers that come late: what the controller makes of them."""

from dataclasses import replace
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.events.types import (
    Acknowledged,
    Judged,
    OwnerDead,
    Published,
    PublishFailed,
    Released,
    Settled,
)
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.records.ending import failure
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator, FakeRank, FakeTask, FaultyPlane
from asyncrl.engine.testing.remote import Delays
from asyncrl.engine.testing.simulation import Remote, simulate, simulated_config


def bound(controller: Controller, versions: int) -> None:
    """Have the hard bound of a run under way be so many versions."""
    front_end = controller.core.front_end
    front_end._settings = replace(front_end._settings, max_staleness=versions)


def test_an_update_that_takes_longer_than_its_time_limit_is_joined_by_the_next_try() -> None:
    """FOUND-C1: a decode batch of 30 s and a limit of 20 s; the second try of a version finds the first at work."""
    generator = FakeGenerator(refuse=lambda version: 30.0 if version == 2 else 0.0)
    config = simulated_config(trainer__publish_timeout_s=20.0, run__steps=4)
    outcome = simulate(config, generators=[generator], remote=Remote())
    assert (outcome.ending.code, outcome.ending.reason) == (0, "step limit reached")
    assert generator.updates[:3] == [0, 1, 2]
    [failed] = outcome.of(PublishFailed)
    said = "version 2 was not published within 20 s (trainer.publish_timeout_s): collector0 did not acknowledge it"
    assert failed.error == f"Overdue('{said}')"
    served = [event.version for event in outcome.of(Acknowledged)]
    assert served == sorted(set(served))


@pytest.mark.parametrize("tries", [1, 3])
def test_publish_tries_are_tries_and_the_error_says_who_was_waited_for(tries: int) -> None:
    """FOUND-C1: nothing comes of the load, ever; each try waits for it its full time."""
    slow = FakeGenerator(refuse=lambda version: HANG_S if version == 1 else 0.0)
    config = simulated_config(collector__count=2, trainer__publish_timeout_s=20.0, trainer__publish_tries=tries)
    outcome = simulate(config, generators=[FakeGenerator(), slow], remote=Remote())
    assert len(outcome.of(PublishFailed)) == tries
    assert outcome.ending.reason == (
        "Overdue: version 1 was not published within 20 s (trainer.publish_timeout_s): "
        "collector1 did not acknowledge it"
    )
    last, first = outcome.of(PublishFailed)[-1].t, outcome.of(PublishFailed)[0].t
    assert last - first == pytest.approx(20.0 * (tries - 1))


def test_version_zero_is_loaded_again_when_its_first_load_failed() -> None:
    """FOUND-C1: all are said to serve version 0 from the start, so its second try once asked nobody."""
    calls = 0

    def refuse(version: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("load 1")
        return 0.0

    generator = FakeGenerator(refuse=refuse)
    outcome = simulate(simulated_config(run__steps=2), generators=[generator])
    assert outcome.ending.code == 0
    assert generator.updates[:2] == [0, 0]
    assert outcome.of(Published)[0].seq > outcome.of(Acknowledged)[0].seq


def test_an_error_without_a_message_says_where_it_was_raised() -> None:
    """FOUND-C1: `error: TimeoutError:` says nothing."""

    def wait() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError) as caught:
        wait()
    reason = failure(caught.value).reason
    assert reason.startswith("TimeoutError: no message; raised in wait (test_run_calls.py, line ")
    assert failure(TimeoutError()).reason == "TimeoutError: no message"


def test_groups_that_arrive_while_a_claims_answer_is_on_its_way_are_judged() -> None:
    """FOUND-C2: the slow poll claims and finds nothing; the last two groups come before its answer does."""
    takes = (7.0, 7.0, 11.0, 11.0)
    outcome = simulate(
        simulated_config(task__epochs=1, run__steps=None),
        task=FakeTask(8),
        generators=[FakeGenerator(seconds=lambda call: takes[call % 4])],
        remote=Remote(plane=Delays(answers=(0.0, 3.0, 0.0))),
    )
    assert outcome.ending.reason == "data exhausted"
    assert len(outcome.of(Judged)) == 8
    assert "run_ended" not in outcome.ledger.by_reason("dropped")


def interrupt_at(seconds: float) -> Any:
    async def beside(controller: Controller) -> None:
        await anyio.sleep(seconds)
        controller.interrupt()

    return beside


def test_an_interruption_while_a_dropped_group_is_cleared_costs_no_capacity() -> None:
    """FOUND-C6: refill drops a group at 1 s, and its clear takes until 3 s; the interrupt comes at 2 s."""
    flat = {2, 3}
    outcome = simulate(
        simulated_config(rollout__max_staleness=2, filters=[{"name": "zero_std"}, {"name": "dynamic_sampling"}]),
        task=FakeTask.in_order(lambda group, index: 0.0 if group in flat else float(index % 2)),
        rank_seconds=lambda step: 30.0,
        wrap=lambda plane: FaultyPlane(plane, {"clear": lambda call: anyio.sleep(2.0)}),
        beside=interrupt_at(2.0),
    )
    assert (outcome.ending.code, outcome.progress.steps) == (130, 1)
    back = {group: event.t for event in outcome.of(Released) for group in event.groups}
    dropped = {event.group: event.t for event in outcome.of(Settled) if "dropped:zero_std" in event.fates}
    assert dropped == {2: 1.0, 3: 1.0}
    assert (back[2], back[3]) == (3.0, 3.0)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5])
def test_at_the_end_of_a_run_all_capacity_is_back_once(seconds: float) -> None:
    """FOUND-C6: that of groups that were trained and waited for their publish as well."""
    outcome = simulate(simulated_config(run__steps=100), beside=interrupt_at(seconds))
    released = [group for event in outcome.of(Released) for group in event.groups]
    assert sorted(released) == sorted(outcome.audit.fates)


def test_an_interruption_does_not_wait_for_the_refill_of_a_batch_that_is_handed_over() -> None:
    """FOUND-C6: at hand-off all is too old, and nothing new comes; the interrupt at 5 s ends the run then."""

    async def beside(controller: Controller) -> None:
        await anyio.sleep(1.2)
        bound(controller, -1)
        await anyio.sleep(3.8)
        controller.interrupt()

    calls = iter([1.0, 1.0])
    outcome = simulate(
        simulated_config(
            rollout__max_staleness=2, collector__group_timeout_s=900.0, filters=[{"name": "dynamic_sampling"}]
        ),
        generators=[FakeGenerator(seconds=lambda call: next(calls, HANG_S))],
        wrap=lambda plane: FaultyPlane(plane, {"leased": lambda call: anyio.sleep(0.3)}),
        beside=beside,
    )
    assert outcome.ledger.by_reason("dropped")["stale"] == 8
    assert (outcome.ending.code, outcome.seconds) == (130, 5.0)


class Late(FakeRank):
    """Answers its long polls 55 s late."""

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        await anyio.sleep(55.0)
        return []


def test_an_actor_that_answers_within_the_limit_lives_however_long_the_poll_was_to_wait() -> None:
    """FOUND-C5: `answer_timeout_s` 60, an answer after 55 s."""
    config = simulated_config(supervision__answer_timeout_s=60.0, run__steps=10)
    outcome = simulate(config, rank=Late, rank_seconds=lambda step: 30.0)
    assert outcome.ending.code == 0
    assert outcome.of(OwnerDead) == []
