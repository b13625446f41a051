"""Metrics and the summary of whole runs: ages of what was trained, and never a NaN."""

import json
import math
import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.collectors.tasks import Reward
from asyncrl.engine import metrics
from asyncrl.engine.events.summary import summarise
from asyncrl.engine.events.types import BatchJudged, Judged, StepEnded
from asyncrl.engine.records import Prompt
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.scripted_engine import ScriptedEngine
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


def summary(outcome: Outcome) -> dict[str, Any]:
    return summarise(
        ledger=outcome.ledger,
        progress=outcome.progress,
        ending=outcome.ending,
        began_s=0.0,
        ended_s=outcome.seconds,
        data_plane_keys_left=len(outcome.keys_left),
        bias_warning=0.9,
    )


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list | tuple):
        return [n for item in value for n in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def test_ages_are_those_of_trained_samples_and_dropped_ones_are_counted_elsewhere() -> None:
    """I1: mean, maximum and histogram agree with the events; stale groups are not among them."""
    seconds: Callable[[int], float] = lambda call: (1.0, 3.2, 0.4, 9.0, 5.1)[call % 5]  # noqa: E731
    config = simulated_config(run__steps=30, rollout__max_staleness=2)
    outcome = simulate(config, generators=[FakeGenerator(seconds=seconds)])
    ages = outcome.audit.ages
    said = summary(outcome)
    assert said["trained_age_histogram"] == {str(age): ages.count(age) for age in sorted(set(ages))}
    assert said["trained_age_max"] == max(ages)
    stale = [event for event in outcome.of(Judged) if event.dropped == "stale"]
    assert stale
    assert all(event.age > 2 for event in stale)
    assert said["ledger"]["dropped"]["stale"] == 4 * len(stale)
    for step in outcome.of(StepEnded):
        mine = [int(age) for age, count in step.ages.items() for _ in range(count)]
        assert step.metrics["staleness/trained_age_mean_versions"] == pytest.approx(sum(mine) / len(mine))
        assert step.metrics["staleness/trained_age_max_versions"] == max(mine)
        assert len(mine) == step.samples


def test_what_ranks_sum_over_tokens_becomes_a_mean_over_the_tokens_of_all() -> None:
    """The fakes' ratios are 1 for every token, on however many ranks."""
    outcome = simulate(simulated_config(run__steps=3, trainer__ranks=3))
    steps = outcome.of(StepEnded)
    assert [step.metrics[metrics.RATIO_MEAN] for step in steps] == [1.0] * 3
    assert min(step.tokens for step in steps) > 3


def test_every_metric_is_always_there() -> None:
    names = {frozenset(step.metrics) for step in simulate(simulated_config(run__steps=8)).of(StepEnded)}
    assert len(names) == 1


class Coin(FakeTask):
    """Rewards that alternate, whatever the engine made."""

    def __init__(self) -> None:
        super().__init__()
        self._coins = cycle((0, 1))

    def score(self, prompt: Prompt, response: str) -> Reward | float:
        return float(next(self._coins))


def engine_run(engine: ScriptedEngine, sampling: Sampling, **changes: Any) -> Outcome:
    config = simulated_config(rollout__max_new_tokens=sampling.max_new_tokens, **changes)
    generators: list[Any] = [EngineGenerator(engine, sampling)]
    return simulate(config, task=Coin(), generators=generators)


def test_with_slow_generation_and_long_tails_the_engine_never_waits_while_run_ahead_is_left() -> None:
    """A step's 8 answers take 4 rows about 8 s and the ranks 1 s; all run-ahead is granted, what has no row waits."""

    def make(request: Request, index: int, version: int) -> int:
        return 1 if random.Random(f"{request.seed}/{index}").random() < 1 / 16 else 7

    engine = ScriptedEngine({}, token_s=0.25, rows=4, make=make)
    sampling = Sampling(128, stop_ids=(1,))
    outcome = engine_run(engine, sampling, run__steps=12, rollout__max_staleness=2, rollout__stale_mode="tokens")
    steps = [step.metrics for step in outcome.of(StepEnded)]
    assert min(step[metrics.ENGINE_BUSY] for step in steps) > 0.95
    assert min(step[metrics.ENGINE_WAITING] for step in steps) >= 4
    assert max(step[metrics.ENGINE_RUNNING] for step in steps) == 4


def test_a_step_says_how_busy_the_engine_was_since_the_last_one() -> None:
    # Of 3 s per step, the next group is not granted before the last one's version is published.
    engine = ScriptedEngine({}, token_s=0.25, rows=8)
    outcome = engine_run(engine, Sampling(8), run__steps=6, rollout__max_staleness=0, rollout__groups_per_step=1)
    shares = [step.metrics[metrics.ENGINE_BUSY] for step in outcome.of(StepEnded)]
    assert shares[0] == pytest.approx(1.0)
    assert shares[1:] == pytest.approx([2 / 3] * 5, abs=0.02)
    assert summary(outcome)["engine_busy_share"] == pytest.approx(sum(shares) / 6)
    rates = [step.metrics[metrics.ENGINE_TOKEN_RATE] for step in outcome.of(StepEnded)]
    assert rates[0] == pytest.approx(4 * 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_batch_in_which_every_reward_is_no_number_has_no_mean_and_leaves_no_nan(bad: float) -> None:
    """I6: the second batch has no reward at all, and no survivors."""
    task = FakeTask.in_order(lambda group, index: Reward(bad) if group in (2, 3) else float(index % 2))
    config = simulated_config(run__steps=2, rollout__max_staleness=0)
    outcome = simulate(config, task=task)
    batches = outcome.of(BatchJudged)
    assert [batch.reward_count for batch in batches] == [8, 0, 8]
    said = summary(outcome)
    assert said["reward_last_10"] == 0.5
    assert all(math.isfinite(n) for n in numbers(said))
    assert all(math.isfinite(n) for step in outcome.of(StepEnded) for n in numbers(step.metrics))
    json.dumps(said, allow_nan=False)


def test_a_run_without_a_single_finite_reward_says_null() -> None:
    """I6."""
    config = simulated_config(run__steps=None, run__batches=3)
    outcome = simulate(config, task=FakeTask(reward=lambda prompt, index: math.nan))
    said = summary(outcome)
    assert (said["reward_first_10"], said["reward_last_10"], said["reward_trained_last_10"]) == (None, None, None)
    assert (said["trained_age_max"], said["seconds_to_first_step"]) == (None, None)
    assert said["trained_age_histogram"] == {}
    assert said["exit"]["code"] == 1
    json.dumps(said, allow_nan=False)


@pytest.mark.parametrize("large", [1e308, -1.7e308])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_near_the_largest_float_do_not_end_the_run_nor_become_infinite(large: float, baseline: str) -> None:
    """Invariant 10: whatever the rewards."""
    task = FakeTask.in_order(lambda group, index: (0.0, 1.0, large, large)[index])
    config = simulated_config(run__steps=2, rollout__max_staleness=0, trainer__advantage_baseline=baseline)
    outcome = simulate(config, task=task)
    assert outcome.ending.code == 0
    assert all(math.isfinite(n) for n in numbers(summary(outcome)))
    assert all(math.isfinite(event.reward_sum) for event in outcome.of(BatchJudged))


def test_rewards_are_means_over_all_samples_judged_before_any_filter() -> None:
    """Two of three groups are flat at 1 and dropped; they count in the reward."""
    task = FakeTask.in_order(lambda group, index: 1.0 if group % 3 else float(index % 2))
    config = simulated_config(run__steps=3, rollout__groups_per_step=3, rollout__max_staleness=0)
    said = summary(simulate(config, task=task))
    assert said["reward_last_10"] == pytest.approx((2 * 1.0 + 0.5) / 3)
    assert said["reward_trained_last_10"] == pytest.approx(0.5)
