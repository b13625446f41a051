"""Runs that learn nothing: they end with the cause, and say so while they go on."""

from dataclasses import replace
from typing import Any

import pytest
import structlog

from asyncrl.engine.errors import NothingLearned
from asyncrl.engine.events.types import BatchGivenUp, BatchJudged, StepEnded
from asyncrl.engine.records.work import RankResult, TrainWork
from asyncrl.engine.testing.fakes import FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, build_chain, drop
from asyncrl.filters.base import AFTER_LOGPROBS

FLAT = FakeTask(reward=lambda prompt, index: 1.0)


def endless(**values: Any) -> dict[str, Any]:
    """Return options of a run that no limit would end, but for one that keeps a broken test from going on for ever."""
    return {"run__steps": None, "run__batches": 200, "run__max_empty_batches": 6, **values}


def clean(outcome: Outcome) -> bool:
    return outcome.keys_left == [] and outcome.ledger.unsettled == [] and outcome.audit.faults == []


class DropsAll(BaseRolloutFilter):
    stage = AFTER_LOGPROBS

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("all")


def test_a_run_whose_prompts_are_all_over_the_budget_ends_with_the_option_that_would_help() -> None:
    """FOUND-L5: with `batches: null` it trained nothing and never ended."""
    config = simulated_config(**endless(rollout__max_new_tokens=19, trainer__micro_batch_tokens=20))
    outcome = simulate(config, generators=[FakeGenerator(length=lambda call: 19)])
    assert isinstance(outcome.ending.error, NothingLearned)
    assert outcome.ending.code == 1
    assert "6 batches in a row had nothing to train, and run.max_empty_batches is 6" in outcome.ending.reason
    assert "48 masked over_budget" in outcome.ending.reason
    assert "Raise trainer.micro_batch_tokens" in outcome.ending.reason
    assert len(outcome.of(BatchGivenUp)) == 6
    assert clean(outcome)


def test_a_run_whose_samples_are_all_masked_by_importance_warns_once_and_ends_with_the_cause() -> None:
    """FOUND-L5: each batch was given up without a word."""
    config = simulated_config(**endless(filters=[{"name": "importance_outliers"}]))
    with structlog.testing.capture_logs() as logs:
        outcome = simulate(config, rank_gap=lambda key: (9.0, 9.0))
    assert isinstance(outcome.ending.error, NothingLearned)
    assert "48 samples of 6 batches none were trained: 48 masked importance_outliers" in outcome.ending.reason
    [warning] = [line for line in logs if "is not a step" in line["event"]]
    assert (warning["batch"], warning["masked_samples"]) == (0, {"importance_outliers": 8})
    assert clean(outcome)


@pytest.mark.parametrize("refill", [None, "train_partial", "wait"])
def test_a_last_stage_that_drops_everything_ends_the_run_with_or_without_refill(refill: str | None) -> None:
    """FOUND-C17: what the claim stage kept was counted; 800 groups judged and never an error."""
    sampling = [{"name": "dynamic_sampling", "max_attempts": 2, "on_exhausted": refill}] if refill else []
    config = simulated_config(**endless(filters=[{"name": "zero_std"}, *sampling]))
    zero_std, *rest = build_chain(config.filters, min_live=2).filters
    outcome = simulate(config, filters=[zero_std, DropsAll(), *rest])
    assert isinstance(outcome.ending.error, NothingLearned)
    assert "48 dropped DropsAll/all" in outcome.ending.reason
    assert outcome.progress.steps == 0
    assert clean(outcome)


def test_batches_without_a_survivor_count_as_well() -> None:
    outcome = simulate(simulated_config(**endless()), task=FLAT)
    assert isinstance(outcome.ending.error, NothingLearned)
    assert len(outcome.of(BatchJudged)) == 6
    assert "48 dropped zero_std; mean reward 1" in outcome.ending.reason
    assert clean(outcome)


def test_a_trained_batch_between_starts_the_count_again() -> None:
    """Groups 0 to 9 are flat, five batches; then one batch that is not; and so on."""
    task = FakeTask.in_order(lambda group, index: float(index % 2) if group % 12 >= 10 else 1.0, prompts=600)
    config = simulated_config(**endless(run__batches=60, rollout__max_staleness=0))
    outcome = simulate(config, task=task)
    assert (outcome.ending.code, outcome.progress.steps) == (0, 10)
    ended = simulate(simulated_config(**endless(run__max_empty_batches=5, rollout__max_staleness=0)), task=task)
    assert isinstance(ended.ending.error, NothingLearned)


def test_null_is_never_and_a_run_without_a_step_says_where_its_samples_went() -> None:
    config = simulated_config(**endless(run__batches=60, run__max_empty_batches=None))
    outcome = simulate(config, task=FLAT)
    assert outcome.ending.code == 1
    assert outcome.ending.error is None
    assert "batch limit reached, but no step was trained: of the 480 samples of 60 batches" in outcome.ending.reason
    assert "480 dropped zero_std" in outcome.ending.reason


def test_alarm_metrics_are_in_every_step() -> None:
    """Eight batches of two groups, one of them flat: half of the samples are not trained."""
    task = FakeTask.in_order(lambda group, index: 1.0 if group % 2 else float(index % 2))
    steps = simulate(simulated_config(run__steps=8, rollout__max_staleness=0), task=task).of(StepEnded)
    names = {name for name in steps[0].metrics if name.startswith("alarms/")}
    assert all({name for name in step.metrics if name.startswith("alarms/")} == names for step in steps)
    assert len(names) == 7
    assert [step.metrics["alarms/untrained_sample_fraction"] for step in steps] == [0.0, *[0.5] * 7]
    assert all(step.metrics["alarms/age_0_ratio_error"] == step.metrics["alarms/raised"] == 0 for step in steps)


class OffRank(FakeRank):
    """Computes another distribution than the generators sampled from."""

    async def train(self, work: TrainWork) -> RankResult:
        result = await FakeRank.train(self, work)
        return replace(result, ratio_sum=0.963 * result.tokens, clipped=result.tokens // 2)


@pytest.mark.parametrize("staleness", [0, 2])
def test_ranks_that_disagree_with_the_generators_at_age_0_are_told_of_from_the_first_step(staleness: int) -> None:
    """FOUND-L1: ratio_mean 0.963 and clipped_fraction 0.69 in the first step of packed rows, and no warning."""
    config = simulated_config(run__steps=12, rollout__max_staleness=staleness)
    outcome = simulate(config, rank=OffRank, rank_seconds=lambda step: 3.0)
    first, *later = (step.metrics["alarms/age_0_ratio_error"] for step in outcome.of(StepEnded))
    assert first == pytest.approx(0.037)
    assert staleness == 0 or 0.0 in later
    assert [alarm.name for alarm in outcome.progress.alarms.raised] == ["ratio_at_age_0"]
