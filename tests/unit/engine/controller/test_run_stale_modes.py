"""Modes and options of staleness in whole runs: drop, gate, tokens, cancel, requeue, pacing; reasons everywhere."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.events.types import Claimed, Dispatched, Put, Settled, StepStarted
from asyncrl.engine.summary import summarise
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.spanning import SpanningGenerator
from asyncrl.engine.testing.virtual_time import virtual_clock
from asyncrl.filters.load import build_filter

TAKES = np.random.default_rng(3).lognormal(-0.5, 1.0, 5000)


def run(batches: int = 60, **options: Any) -> Outcome:
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


def test_dropping_discards_long_answers_and_the_run_says_so() -> None:
    bias = run().progress.length_bias
    assert bias.ratio is not None
    assert bias.ratio < 0.8
    assert bias.wasted_tokens["dropped:stale"] == sum(
        n * (bias.generated.counts[length] > 0) * length
        for length, n in (bias.generated.counts - bias.fresh.counts).items()
    )
    quarters = bias.summary()["quarters"]
    shares = [quarter["fresh"] / quarter["generated"] for quarter in quarters]
    assert shares[0] > shares[-1]


def test_the_gate_loses_nothing_to_age_and_the_trainer_idles() -> None:
    gate, drop = run(rollout__stale_mode="gate"), run()
    assert gate.progress.length_bias.ratio is not None
    assert gate.progress.length_bias.ratio >= 0.95
    assert max(gate.progress.ages) <= 2
    assert gate.seconds / gate.progress.steps > drop.seconds / drop.progress.steps


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


def test_cancelling_ends_what_no_batch_can_train_and_the_ratio_is_not_claimed_to_be_known() -> None:
    outcome = run(rollout__cancel_stale=True)
    dropped = outcome.ledger.by_reason("dropped")
    assert dropped["cancelled_stale"] > 20 * dropped.get("stale", 0)
    assert outcome.progress.length_bias.ratio is None
    assert outcome.progress.length_bias.cancelled_groups > 0


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

    assert waiting_at_dispatch(slow_trainer(True)) < 2 <= waiting_at_dispatch(slow_trainer(False))


@pytest.mark.parametrize("tries", [0, 2])
def test_a14_a_slow_prompt_is_issued_again_so_often_and_counted(tries: int) -> None:
    """A14: nine fast prompts and one that always takes longer than the bound: bounded tries, a count, a warning."""
    config = simulated_config(
        rollout__requeue_tries=tries, rollout__max_staleness=1, task__epochs=1, run__steps=None, run__batches=None
    )
    slow_prompt = 3
    dispatched: list[int] = []

    class SlowForOne(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            prompt = request.prompt_ids[0]
            dispatched.append(prompt)
            self.seconds = lambda _: 30.0 if prompt == FakeTask(10).prompts()[slow_prompt].id + 2 else 1.0
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
    assert outcome.controller.dispatcher.stale_prompts[slow_prompt] >= 1


REASONS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "zero_std"}, "dropped", "zero_std"),
    ({"name": "staleness", "max_age": 0}, "dropped", "staleness/stale"),
    ({"name": "length", "max_tokens": 1}, "dropped", "length/too_long"),
    ({"name": "overlong", "max_tokens": 2}, "masked", "overlong"),
    ({"name": "duplicate"}, "masked", "duplicate"),
    ({"name": "repetition", "max_share": 0.0, "ngram": 1}, "masked", "repetition"),
    (
        {"name": "dynamic_sampling", "low": 0.9, "max_attempts": 1, "on_exhausted": "train_partial"},
        "dropped",
        "dynamic_sampling/out_of_band",
    ),
    ({"name": "difficulty", "low": 0.9, "min_groups": 1, "explore": 0.0}, "dropped", "difficulty/too_hard"),
    ({"name": "quota", "shares": {"fake": 0.1}}, "dropped", "quota/over_quota"),
    ({"name": "finite_reward"}, "dropped", "finite_reward/nan_reward"),
    ({"name": "min_live", "samples": 4}, "dropped", "min_live/failed_siblings"),
    ({"name": "truncated", "max_share": 0.0}, "dropped", "truncated"),
    ({"name": "importance_outliers", "max_log_ratio": 1.0}, "masked", "importance_outliers"),
]


class _Cut(FakeGenerator):
    """Every third call is cut by the limit; tokens repeat."""

    async def generate(self, request: Any) -> Any:
        from dataclasses import replace

        call = self.calls
        completions = await super().generate(request)
        return [replace(c, finished=call % 3 != 0) for c in completions]


@pytest.mark.parametrize(("entry", "kind", "reason"), REASONS)
def test_the_reason_of_every_built_in_is_in_ledger_summary_metrics_and_log(
    entry: dict[str, Any], kind: str, reason: str
) -> None:
    rewards = {
        "zero_std": lambda prompt, index: float(prompt % 2),
        "finite_reward": lambda p, i: float("nan") if p == 1 and i == 0 else float(i % 2),
    }
    rewards["min_live"] = rewards["finite_reward"]
    task = FakeTask(8, rewards.get(entry["name"], lambda prompt, index: float(index % 2)))
    filter_ = build_filter(entry)
    outcome = simulate(
        simulated_config(run__steps=None, run__batches=6, rollout__max_staleness=2),
        task=task,
        generators=[_Cut(length=lambda call: 1 if entry["name"] == "duplicate" else 3)],
        filters=[filter_],
        rank_gap=lambda key: (2.0, 0.5) if key.endswith("g1") else (0.0, 0.0),
    )
    counts = outcome.ledger.by_reason(kind)
    assert counts.get(reason, 0) > 0
    summary = summarise(
        ledger=outcome.ledger,
        progress=outcome.progress,
        ending=outcome.ending,
        started_wall=0,
        ended_wall=1,
        data_plane_keys_left=0,
        bias_warning=0.9,
    )
    assert summary["ledger"][kind][reason] == counts[reason]
    logged = Counter(fate for event in outcome.of(Settled) for fate in event.fates)
    assert logged[f"{kind}:{reason}"] == counts[reason]
    stats = outcome.controller.chain.stats[filter_.name]
    assert (stats.dropped if kind == "dropped" else stats.masked)[reason] > 0
