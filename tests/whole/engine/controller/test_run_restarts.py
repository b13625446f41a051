"""A collector that dies is replaced while the run goes on: its prompts come again, and every sample has one fate."""

from collections import Counter
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import EVALUATION
from asyncrl.engine.errors import ActorDied, EngineDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import (
    ActorRestarted,
    Dispatched,
    Evaluated,
    EvaluationEnded,
    Judged,
    OwnerDead,
    Published,
    Settled,
)
from asyncrl.engine.loop.examiner import Examiner, ExaminerSettings
from asyncrl.engine.simulate.virtual_loop import fake_evaluation
from asyncrl.engine.testing.fakes import FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.simulation import Collected, Outcome, Remote, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.replay import replay

PROMPTS = 30


def run(*, collectors: int = 2, remote: Remote, **values: Any) -> Outcome:
    config = simulated_config(
        run__steps=None, task__epochs=1, collector__count=collectors, filters=[], rollout__max_staleness=2, **values
    )
    return simulate(
        config,
        task=FakeTask(PROMPTS),
        generators=[FakeGenerator(seconds=lambda call: 1.0 + call % 3) for _ in range(collectors)],
        remote=remote,
    )


def judged(outcome: Outcome) -> Counter[int | str]:
    prompts = {event.group: event.prompt for event in outcome.of(Dispatched)}
    return Counter(prompts[event.group] for event in outcome.of(Judged))


def check(outcome: Outcome) -> None:
    """The ledger is exact, each prompt was judged once, and the log replays."""
    recording = recording_of(outcome)
    assert prove(recording.events).faults() == []
    assert (outcome.audit.faults, outcome.keys_left) == ([], [])
    assert judged(outcome) == Counter(range(PROMPTS))
    assert replay(recording).difference is None


@pytest.mark.parametrize("collectors", [1, 2])
@pytest.mark.parametrize("hangs", [False, True])
def test_the_run_goes_on_and_the_prompts_in_flight_come_again(collectors: int, hangs: bool) -> None:
    """Also without another one meanwhile, and if it only falls silent."""
    remote = Remote(killed_at={"collector0": [5.5]}, restart_s=4.0, hangs=hangs)
    outcome = run(collectors=collectors, remote=remote, supervision__answer_timeout_s=5.0)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    [death], [restart] = outcome.of(OwnerDead), outcome.of(ActorRestarted)
    assert (death.owner, death.replaced) == (restart.actor, True) == ("collector0", True)
    assert death.t == pytest.approx(10.5 if hangs else 5.5, abs=5.0 if hangs else 0.01)
    assert restart.seconds == pytest.approx(5.0, abs=0.1)  # A pause of 1 s, and a start of 4.
    lost = {event.group for event in outcome.of(Settled) if "failed:collector_died" in event.fates}
    assert lost == {event.retry_of for event in outcome.of(Dispatched) if event.retry_of is not None} != set()
    check(outcome)


def test_the_others_and_the_trainer_go_on_meanwhile() -> None:
    outcome = run(remote=Remote(killed_at={"collector0": [5.5]}, restart_s=15.0))
    without = [event for event in outcome.of(Published) if 6.0 < event.t < 20.0]
    assert len(without) > 3
    check(outcome)


def test_who_dies_too_often_ends_the_run_with_the_cause_and_the_count() -> None:
    remote = Remote(killed_at={"collector0": [3.5, 7.5, 12.5]}, restart_s=1.0)
    outcome = run(remote=remote, supervision__restarts=2)
    assert outcome.ending.code == 1
    assert outcome.ending.reason.startswith("ActorDied: collector0 died during ")
    assert outcome.ending.reason.endswith(
        "collector0 was restarted 2 times within 3600 s before (supervision.restarts)"
    )
    assert [event.replaced for event in outcome.of(OwnerDead)] == [True, True, False]
    assert replay(recording_of(outcome)).difference is None


def test_one_that_dies_while_it_starts_is_started_again() -> None:
    outcome = run(remote=Remote(killed_at={"collector0": [5.5, 8.0]}, restart_s=4.0))
    assert [event.replaced for event in outcome.of(OwnerDead)] == [True, True]
    assert [event.restart for event in outcome.of(ActorRestarted)] == [2]
    check(outcome)


def test_with_restarts_0_a_death_is_that_of_the_run() -> None:
    outcome = run(remote=Remote(killed_at={"collector0": [5.5]}, restart_s=4.0), supervision__restarts=0)
    assert outcome.ending.reason.endswith("supervision.restarts is 0, by which no actor is restarted")


def test_an_engine_that_dies_takes_its_collector_with_it_and_no_group_fails_for_it() -> None:
    """What was in flight is lost with the process, and comes again."""
    once = iter([True])

    def fail(call: int) -> None:
        if call == 5 and next(once, False):
            raise EngineDied("vLLM's engine process died")

    config = simulated_config(run__steps=None, task__epochs=1, filters=[], rollout__max_staleness=2)
    outcome = simulate(
        config,
        task=FakeTask(PROMPTS),
        generators=[FakeGenerator(seconds=lambda call: 1.0 + call % 3, fail=fail)],
        remote=Remote(restart_s=4.0),
    )
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    assert [event.error for event in outcome.of(OwnerDead)] == ["EngineDied: vLLM's engine process died"]
    assert outcome.ledger.by_reason("failed").keys() == {"collector_died"}
    check(outcome)


class Dies:
    """A collector that is killed at 1.5 s, with some prompts answered."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self.name = collector.name

    def __getattr__(self, method: str) -> Any:
        return getattr(self._collector, method)

    async def run(self) -> None:
        with anyio.move_on_after(1.5):
            await self._collector.run()
        raise ActorDied("evaluator died during run: killed", actor="evaluator")


def test_what_evaluates_is_replaced_and_asked_for_the_rest() -> None:
    config = simulated_config(evaluation__every=1, evaluation__samples=1, rollout__group_size=4)
    collected = Collected()

    async def main() -> None:
        plane, rank = LocalPlane(clock=virtual_clock), FakeRank("rank0", LocalPlane())
        generator = FakeGenerator(seconds=lambda call: float(call % 4))
        part = await fake_evaluation(config, generator, task=FakeTask(8), plane=plane, source=rank)
        dies: Any = Dies(part.collector)

        async def another(error: Exception) -> Any:
            await anyio.sleep(3.0)
            return (
                await fake_evaluation(config, generator.anew(), task=FakeTask(8), plane=plane, source=rank)
            ).collector

        examiner = Examiner(
            ExaminerSettings.of(config),
            dies,
            part.prompts,
            plane=plane,
            events=EventLog(clock=virtual_clock, wall=virtual_clock, folds=[collected]),
            clock=virtual_clock,
            replace=another,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(examiner.run)
            ended = await examiner.examine(0, part.transport.offer(await rank.copy_weights(part.transport), ()))
            assert ended.scores.samples == 8
            assert await plane.keys(EVALUATION) == []
            tasks.cancel_scope.cancel()

    run_virtual(main)
    assert sum(isinstance(event, EvaluationEnded) for event in collected.events) == 1
    answered = [event.prompt for event in collected.events if isinstance(event, Evaluated)]
    assert sorted(answered, key=str) == sorted(set(answered), key=str)
