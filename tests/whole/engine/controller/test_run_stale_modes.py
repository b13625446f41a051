"""Modes and options of staleness in whole runs: drop, gate, tokens, cancel, requeue, pacing."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.events.types import (
    Acknowledged,
    BatchTaken,
    Claimed,
    Dispatched,
    Put,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.records.fate import CANCELLED
from asyncrl.engine.records.fate import dropped as dropped_for
from asyncrl.engine.testing.conformance.spanning import SpanningGenerator
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config

TAKES = np.random.default_rng(3).lognormal(-0.5, 1.0, 5000)


def run(batches: int = 30, **options: Any) -> Outcome:
    """Long-tailed durations, lengths in proportion; generation and training equally fast."""
    generator = SpanningGenerator(
        seconds=lambda call: float(TAKES[call]), length=lambda call: 2 + int(20 * TAKES[call]), clock=virtual_clock
    )
    config = simulated_config(
        **{
            "rollout.groups_per_step": 8,
            "rollout.group_size": 2,
            "rollout.max_staleness": 2,
            "run.steps": None,
            "run.batches": batches,
            "trainer.micro_batch_tokens": 100_000,
            "collector.group_timeout_s": 1e6,
            **{path.replace("__", "."): value for path, value in options.items()},
        }
    )
    outcome = simulate(config, generators=[generator], task=FakeTask(64), rank_seconds=lambda _: 1 / 3)
    assert outcome.ending.code == 0, outcome.ending
    assert outcome.ledger.balanced
    assert outcome.keys_left == []
    return outcome


@pytest.fixture(scope="module")
def dropping() -> Outcome:
    return run()


def test_dropping_discards_long_answers_and_the_run_says_so(dropping: Outcome) -> None:
    bias = dropping.progress.length_bias
    assert bias.ratio is not None
    assert bias.ratio < 0.8
    assert bias.wasted_tokens["dropped:stale"] == sum(
        n * (bias.generated.counts[length] > 0) * length
        for length, n in (bias.generated.counts - bias.fresh.counts).items()
    )
    quarters = bias.summary()["quarters"]
    shares = [quarter["fresh"] / quarter["generated"] for quarter in quarters]
    assert shares[0] > shares[-1]


def test_the_gate_loses_nothing_to_age_and_the_trainer_idles(dropping: Outcome) -> None:
    gate = run(rollout__stale_mode="gate")
    assert gate.progress.length_bias.ratio is not None
    assert gate.progress.length_bias.ratio >= 0.95
    assert max(gate.progress.ages) <= 2
    assert "stale" not in gate.ledger.by_reason("dropped")
    assert gate.seconds / gate.progress.steps > dropping.seconds / dropping.progress.steps


def test_the_gate_leaves_no_more_old_groups_than_the_next_batch_can_take() -> None:
    """A quick group of version 1 beside one of version 0 would leave three of version 0 for a batch of two."""
    takes = [1.0, 1.0, 2.0, 20.0, 20.0, 20.0, 0.1, 0.1]
    generator = FakeGenerator(seconds=lambda call: takes[call] if call < len(takes) else 1.0)
    config = simulated_config(rollout__stale_mode="gate", rollout__max_staleness=2, run__steps=5)
    outcome = simulate(config, generators=[generator])
    assert outcome.progress.steps == 5
    assert "stale" not in outcome.ledger.by_reason("dropped")


def test_the_gate_opens_at_its_deadline() -> None:
    config = simulated_config(
        rollout__stale_mode="gate", rollout__gate_timeout_s=50.0, rollout__max_staleness=1, run__steps=6
    )
    slow = FakeGenerator(seconds=lambda call: 1e4 if call == 0 else 1.0)
    outcome = simulate(
        config.model_copy(update={"collector": config.collector.model_copy(update={"group_timeout_s": 1e6})}),
        generators=[slow],
    )
    assert outcome.ending.reason == "step limit reached"
    assert 50 <= outcome.seconds < 1e3


def test_in_mode_tokens_only_tokens_within_the_bound_are_trained_and_no_group_is_dropped() -> None:
    outcome = run(rollout__stale_mode="tokens")
    assert "stale" not in outcome.ledger.by_reason("dropped")
    assert outcome.progress.length_bias.ratio == pytest.approx(1.0, abs=0.05)
    assert max(outcome.progress.ages) <= 2
    # An independent count of the tokens of age at most 2, from the spans in the puts.
    puts = {event.group: event for event in outcome.of(Put)}
    expected = 0
    for step in outcome.of(StepStarted):
        for group in step.groups:
            tags = puts[group].tags
            lengths = tags["response_tokens"]
            for sample, length in enumerate(lengths):
                starts = [(tags["version"], 0)]
                if "spans" in tags:
                    parts = (part.split(":") for part in tags["spans"][sample].split(","))
                    starts = [(int(version), int(first)) for version, first in parts]
                for (version, first), end in zip(starts, [f for _, f in starts[1:]] + [length], strict=True):
                    expected += (end - first) * (step.version - version <= 2)
    assert outcome.progress.trained_tokens == expected
    generated = sum(sum(event.tags["response_tokens"]) for event in puts.values())
    assert expected < generated
    masked = outcome.ledger.by_reason("masked")
    assert set(masked) <= {"stale"}
    of_trained = sum(
        length
        for event in outcome.of(Settled)
        if event.group in puts
        for fate, length in zip(event.fates, puts[event.group].tags["response_tokens"], strict=True)
        if fate == "trained"
    )
    assert outcome.progress.length_bias.withheld_tokens == of_trained - expected > 0


def test_cancelling_ends_what_no_batch_can_train_and_the_ratio_is_not_claimed_to_be_known() -> None:
    outcome = run(rollout__cancel_stale=True)
    dropped = outcome.ledger.by_reason("dropped")
    assert dropped["cancelled_stale"] > 20 * dropped.get("stale", 0)
    assert outcome.progress.length_bias.ratio is None
    assert outcome.progress.length_bias.cancelled_groups > 0


def test_a_group_that_the_next_batch_could_train_is_not_cancelled() -> None:
    """With a bound of S the first to be cancelled is S + 1 versions older than the batch that is assembled."""
    outcome = run(rollout__cancel_stale=True)
    served, version, taken = 0, 0, False
    stamps: dict[int, int] = {}
    ages = []
    for event in outcome.events:
        match event:
            case Acknowledged():
                served = event.version
            case Dispatched():
                stamps[event.group] = served
            case BatchTaken():
                taken = True
            case StepEnded():
                version, taken = event.version, False
            case Settled() if dropped_for(CANCELLED) in event.fates:
                ages.append(version + taken - stamps[event.group])
    assert min(ages) == outcome.config.rollout.max_staleness + 1


def test_pacing_holds_grants_back_while_a_batch_waits() -> None:
    """With a slow trainer a whole batch waits at most when a group is dispatched."""

    def waiting_at_dispatch(outcome: Outcome) -> int:
        buffered: set[int] = set()
        most = 0
        for event in outcome.events:
            match event:
                case Put():
                    buffered.add(event.group)
                case Claimed():
                    buffered -= set(event.groups)
                case Dispatched():
                    most = max(most, len(buffered))
        return most

    def slow_trainer(pacing: bool) -> Outcome:
        config = simulated_config(rollout__pacing=pacing, rollout__max_staleness=4, run__steps=12)
        return simulate(config, rank_seconds=lambda _: 20.0)

    def age(outcome: Outcome) -> float:
        """Of the last step, when run-ahead is full."""
        return outcome.of(StepEnded)[-1].metrics["staleness/trained_age_mean_versions"]

    paced, free = slow_trainer(True), slow_trainer(False)
    assert waiting_at_dispatch(paced) < 2 <= waiting_at_dispatch(free)
    assert (age(paced), age(free)) == (3.0, 4.0)
    assert paced.seconds < 1.05 * free.seconds


@pytest.mark.parametrize("tries", [0, 2])
def test_a_slow_prompt_is_issued_again_so_often_and_counted(tries: int) -> None:
    """CASE-A14: nine fast prompts and one that always takes longer than the bound: bounded tries, a count."""
    config = simulated_config(
        rollout__requeue_tries=tries, rollout__max_staleness=1, task__epochs=1, run__steps=None, run__batches=None
    )
    slow_prompt = 3
    dispatched: list[int] = []

    class SlowForOne(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            prompt = request.prompt_ids[0]
            dispatched.append(prompt)
            self.seconds = lambda _: 30.0 if prompt == slow_prompt + 2 else 1.0
            return await super().generate(request)

    outcome = simulate(config, task=FakeTask(10), generators=[SlowForOne()])
    assert outcome.ending.reason == "data exhausted"
    retries = [event for event in outcome.of(Dispatched) if event.retry_of is not None]
    stale = [event.group for event in outcome.of(Settled) if "dropped:stale" in event.fates]
    issued = Counter(event.prompt for event in outcome.of(Dispatched))
    assert len(stale) >= 1
    assert {event.prompt for event in retries} <= {slow_prompt}
    assert issued[slow_prompt] <= 1 + tries
    assert len(retries) <= tries
    prompts = outcome.progress.length_bias.prompts.summary()
    [worst] = prompts["worst"]
    assert (worst["prompt"], worst["groups"]) == (slow_prompt, issued[slow_prompt])
    assert worst["lost_groups"] == len(stale)
    assert prompts["all_lost"] == (len(stale) == issued[slow_prompt])


def test_each_turn_of_a_prompt_has_its_own_tries() -> None:
    """Over several epochs a prompt that is lost in each is issued again in each."""
    config = simulated_config(
        rollout__requeue_tries=1, rollout__max_staleness=1, task__epochs=3, run__steps=None, run__batches=None
    )
    slow = 3

    class SlowForOne(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            self.seconds = lambda _: 30.0 if request.prompt_ids[0] == slow + 2 else 1.0
            return await super().generate(request)

    outcome = simulate(config, task=FakeTask(10), generators=[SlowForOne()])
    issued = outcome.of(Dispatched)
    lost = {event.group for event in outcome.of(Settled) if "dropped:stale" in event.fates}
    retries = {event.retry_of: event.group for event in issued if event.retry_of is not None}
    first = {event.group for event in issued if event.prompt == slow and event.retry_of is None}
    assert len(first) == 3
    # Whatever was lost at its first try came again, and what was lost at its second did not.
    assert set(retries) == lost & first
    assert len(retries) >= 2
