"""How runs end: limits, reward, interruption, errors of each part; what is left and what is said."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from asyncrl.engine.errors import ConfigError, DataPlaneSilent, Overdue
from asyncrl.engine.events.types import Judged, StepEnded, StepStarted
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.records.work import RankResult, TrainWork
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator, FakeRank, FakeTask, FaultyPlane
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, keep


def bound(controller: Controller, versions: int) -> None:
    """Have the hard bound of a run under way be so many versions."""
    front_end = controller.core.front_end
    front_end._settings = replace(front_end._settings, max_staleness=versions)


def clean(outcome: Outcome) -> bool:
    """Say whether nothing is left: no key, no sample without a fate, no fault in the events."""
    return outcome.keys_left == [] and outcome.ledger.unsettled == [] and outcome.audit.faults == []


class Raises(BaseRolloutFilter):
    """Raises at the `nth` group it is asked about."""

    def __init__(self, nth: int) -> None:
        self.nth = nth

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self.nth -= 1
        if not self.nth:
            raise KeyError("my filter")
        return keep()


def fails_at(step: int) -> Callable[[int], None]:
    def fail(now: int) -> None:
        if now == step:
            raise ArithmeticError(f"rank 0 in step {step}")

    return fail


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_raises_in_train_ends_the_run_with_that_error(staleness: int, ranks: int) -> None:
    """CASE-B19, CASE-E6."""
    config = simulated_config(rollout__max_staleness=staleness, run__steps=9, trainer__ranks=ranks)
    outcome = simulate(config, rank_fail=fails_at(3))
    assert outcome.ending.code == 1
    assert outcome.ending.reason == "ArithmeticError: rank 0 in step 3"
    assert outcome.progress.steps == 2
    assert outcome.ledger.trained == 16
    assert outcome.controller.core.versions.trainer == 2
    assert clean(outcome)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_filter_that_raises_ends_the_run_with_its_error_and_name(nth: int) -> None:
    """E6: claimed groups included, nothing is left."""
    outcome = simulate(simulated_config(), filters=[Raises(nth)])
    assert outcome.ending.code == 1
    assert "my filter" in outcome.ending.reason
    assert getattr(outcome.ending.error, "__notes__", []) == ["raised by filter Raises"]
    assert clean(outcome)


@pytest.mark.parametrize("operation", ["put", "claim", "read", "clear", "leased"])
@pytest.mark.parametrize("number", [1, 4])
def test_an_operation_of_the_data_plane_that_raises_ends_the_run_with_its_error(operation: str, number: int) -> None:
    """E2, E6: also in the middle of a settlement."""

    def fail(call: int) -> None:
        if call == number:
            raise OSError(f"{operation} {call}")

    outcome = simulate(
        simulated_config(run__steps=20),
        wrap=lambda plane: FaultyPlane(plane, {operation: fail}),
    )
    assert outcome.ending.code == 1
    assert outcome.ending.reason == f"OSError: {operation} {number}"
    assert clean(outcome)


def _fail_at(number: int, error: Exception, call: int) -> None:
    if call == number:
        raise error


def test_a_data_plane_that_no_longer_answers_is_not_asked_again_for_what_is_left() -> None:
    """Its answer would be waited for as long again, and the run would end that much later."""
    left = []
    for error in (DataPlaneSilent("no answer within 5 s"), OSError("another")):
        calls = {"clear": partial(_fail_at, 4, error)}
        outcome = simulate(simulated_config(run__steps=20), wrap=partial(FaultyPlane, before=calls))
        assert outcome.ending.error is error
        left.append(anyio.run(outcome.controller.keys_left, "train"))
    assert left == [None, 0]


def test_a_slow_clear_takes_no_other_groups_with_it() -> None:
    """E2: while a drop is being cleared, groups come and go; each key is cleared for its own group."""
    task = FakeTask.in_order(lambda group, index: 0.0 if group % 3 == 0 else float(index % 2), prompts=200)
    outcome = simulate(
        simulated_config(run__steps=20, rollout__groups_per_step=3),
        task=task,
        wrap=lambda plane: FaultyPlane(plane, {"clear": lambda call: anyio.sleep(call % 4 * 0.7)}),
    )
    assert outcome.ending.code == 0
    fates = outcome.audit.fates
    judged = [event.group for event in outcome.of(Judged) if event.dropped != "stale"]
    for group in [group for group in judged if "dropped:run_ended" not in fates[group]]:
        assert fates[group] == ["dropped:zero_std" if group % 3 == 0 else "trained"] * 4
    assert clean(outcome)


def interrupt_at(seconds: float, ending: Ending | None = None) -> Callable[[Controller], Any]:
    async def beside(controller: Controller) -> None:
        await anyio.sleep(seconds)
        controller.interrupt(ending)

    return beside


def test_an_end_from_outside_has_its_own_code_and_cause() -> None:
    """FOUND-C8, FOUND-C11: as for a signal that is not Ctrl-C, and a disk that is full."""
    ending = Ending(1, "disk full", OSError("disk full"))
    outcome = simulate(simulated_config(run__steps=1000), beside=interrupt_at(2.5, ending))
    assert outcome.ending is ending
    assert len(outcome.of(StepStarted)) == len(outcome.of(StepEnded)) > 0
    assert clean(outcome)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.0, 7.7])
def test_an_interruption_finishes_the_step_settles_and_exits_130(staleness: int, seconds: float) -> None:
    """E6: a step takes 2 s; it ends before the run does, and no other begins."""
    config = simulated_config(rollout__max_staleness=staleness, run__steps=1000)
    outcome = simulate(config, rank_seconds=lambda step: 2.0, beside=interrupt_at(seconds))
    assert (outcome.ending.code, outcome.ending.reason) == (130, "interrupted")
    begun, ended = outcome.of(StepStarted), outcome.of(StepEnded)
    assert len(begun) == len(ended)
    assert [step.t for step in begun if step.t > seconds] == []
    assert outcome.seconds <= seconds + 5
    assert outcome.ledger.trained == 8 * len(ended)
    assert clean(outcome)


def test_an_interruption_while_nothing_comes_ends_at_once() -> None:
    config = simulated_config(collector__group_timeout_s=1e6)
    outcome = simulate(config, generators=[FakeGenerator(seconds=lambda call: HANG_S)], beside=interrupt_at(10.0))
    assert (outcome.ending.code, outcome.seconds) == (130, 10.0)
    assert clean(outcome)


def test_an_error_in_the_step_that_an_interruption_waits_for_is_the_ending() -> None:
    outcome = simulate(
        simulated_config(), rank_seconds=lambda step: 5.0, rank_fail=fails_at(1), beside=interrupt_at(2.0)
    )
    assert outcome.ending.code == 1
    assert "rank 0 in step 1" in outcome.ending.reason


def test_the_first_cause_wins() -> None:
    """The rank fails in its second step; that the generator dies later is no news."""

    class Dying(FakeGenerator):
        async def run(self) -> None:
            await anyio.sleep(3.5)
            raise OSError("out of memory")

    def run(rank_dies_in: int) -> str:
        return simulate(
            simulated_config(run__steps=50), generators=[Dying()], rank_fail=fails_at(rank_dies_in)
        ).ending.reason

    assert run(2) == "ArithmeticError: rank 0 in step 2"
    assert run(40) == "OSError: out of memory"


def test_an_error_while_stopping_does_not_hide_the_first_cause() -> None:
    def refuse(call: int) -> None:
        raise ValueError("clear is broken as well")

    outcome = simulate(
        simulated_config(run__steps=9),
        rank_fail=fails_at(1),
        wrap=lambda plane: FaultyPlane(plane, {"clear": refuse}),
    )
    assert outcome.ending.reason == "ArithmeticError: rank 0 in step 1"


def test_a_step_that_takes_too_long_ends_the_run() -> None:
    outcome = simulate(simulated_config(trainer__step_timeout_s=30.0), rank_seconds=lambda step: HANG_S)
    assert isinstance(outcome.ending.error, Overdue)
    assert "step 1 took longer than 30 s" in outcome.ending.reason
    assert outcome.seconds < 60
    assert clean(outcome)


class SecondHangs(FakeRank):
    async def train(self, work: TrainWork) -> RankResult:
        await anyio.sleep(HANG_S if self.name == "rank1" else 0.0)
        return await super().train(work)


def test_a_step_that_takes_too_long_names_the_ranks_that_are_late() -> None:
    outcome = simulate(simulated_config(trainer__ranks=2, trainer__step_timeout_s=30.0), rank=SecondHangs)
    assert outcome.ending.reason == (
        "Overdue: step 1 took longer than 30 s (trainer.step_timeout_s); the trainer waits for rank1"
    )


def test_the_step_limit_ends_with_code_0() -> None:
    outcome = simulate(simulated_config(run__steps=7))
    assert (outcome.ending.code, outcome.ending.reason, outcome.progress.steps) == (0, "step limit reached", 7)
    assert clean(outcome)


def test_the_batch_limit_counts_batches_without_survivors() -> None:
    task = FakeTask.in_order(lambda group, index: 0.0 if group % 4 < 2 else float(index % 2), prompts=200)
    config = simulated_config(run__steps=None, run__batches=6, rollout__max_staleness=0)
    outcome = simulate(config, task=task)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "batch limit reached")
    assert (outcome.progress.batches, outcome.progress.steps) == (6, 3)
    assert clean(outcome)


@pytest.mark.parametrize(("window", "batches"), [(1, 11), (4, 14), (15, 25)])
def test_stop_at_reward_takes_the_mean_of_the_last_window_of_batches_judged(window: int, batches: int) -> None:
    """Rewards jump at group 20 from a mean of 0 (flat, so no step) to a mean of 0.5; two groups a batch."""
    task = FakeTask.in_order(lambda group, index: 0.0 if group < 20 else float(index % 2), prompts=200)
    config = simulated_config(
        run__steps=None,
        run__batches=60,
        run__stop_at_reward=0.5,
        run__reward_window=window,
        rollout__max_staleness=0,
        filters=[],
    )
    outcome = simulate(config, task=task)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "reward reached")
    assert outcome.progress.batches == batches
    assert clean(outcome)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"run__steps": None, "run__batches": 3}, FakeTask(reward=lambda prompt, index: 1.0)),
        ({"task__epochs": 1}, FakeTask(reward=lambda prompt, index: float("nan"))),
    ],
)
def test_a_run_that_trained_no_step_exits_1(config: dict[str, Any], task: FakeTask) -> None:
    """J2: never "complete" with zero steps."""
    outcome = simulate(simulated_config(**config), task=task)
    assert outcome.ending.code == 1
    assert "no step was trained" in outcome.ending.reason
    assert outcome.progress.steps == 0
    assert clean(outcome)


@pytest.mark.parametrize("epochs", [0, -1])
def test_zero_epochs_are_a_configuration_error(epochs: int) -> None:
    """J2."""
    with pytest.raises(ConfigError, match=r"task\.epochs"):
        simulated_config(task__epochs=epochs)


@pytest.mark.parametrize("refill", [False, True])
def test_waiting_longer_than_a_lease_loses_no_claim(refill: bool) -> None:
    """A claim ends by settle, return or its owner's death; time is only the fallback for a lost owner."""
    filters = [{"name": "dynamic_sampling"}] if refill else []
    config = simulated_config(
        data_plane__lease_s=60.0,
        trainer__step_timeout_s=1000.0,
        collector__group_timeout_s=1000.0,
        run__steps=4,
        filters=filters,
    )
    generator = FakeGenerator(seconds=lambda call: 50.0 * (1 + call % 4))
    outcome = simulate(config, generators=[generator], rank_seconds=lambda step: 150.0)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "step limit reached")
    assert "lease_lost" not in outcome.ledger.by_reason("dropped")
    assert clean(outcome)


def test_with_refill_a_group_that_falls_out_at_hand_off_is_replaced_while_the_next_batch_is_claimed() -> None:
    """Two claims are then under way at once; they must not take each other's groups.

    The bound tightens for a moment, and `held` takes a while, so that the first batch falls out.
    """

    async def tighten(controller: Controller) -> None:
        await anyio.sleep(1.2)
        bound(controller, -1)
        await anyio.sleep(0.5)
        bound(controller, 2)

    outcome = simulate(
        simulated_config(run__steps=8, filters=[{"name": "dynamic_sampling", "max_attempts": 9}]),
        generators=[FakeGenerator(seconds=lambda call: 1.0 + call % 3)],
        beside=tighten,
        wrap=lambda plane: FaultyPlane(plane, {"leased": lambda call: anyio.sleep(0.3)}),
    )
    assert (outcome.ending.code, outcome.ending.reason) == (0, "step limit reached")
    assert outcome.ledger.by_reason("dropped")["stale"] >= 4
    assert clean(outcome)
