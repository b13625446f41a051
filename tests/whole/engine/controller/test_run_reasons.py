"""Every reason of every built-in filter, in whole runs: with its count in ledger, summary, metrics and event log."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.tasks import Reward
from asyncrl.engine.events.summary import summarise
from asyncrl.engine.events.types import BatchJudged, Judged, Settled, StepEnded
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.filters.load import BUILT_IN, build_filter

REASONS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "staleness", "max_age": 0}, "dropped", "staleness/stale"),
    ({"name": "staleness", "max_mean_token_age": 0.5}, "dropped", "staleness/stale_tokens"),
    ({"name": "zero_std", "tag": "flat"}, "dropped", "zero_std"),
    (
        {"name": "dynamic_sampling", "tag": "flat", "low": 0.2},
        "dropped",
        "dynamic_sampling/out_of_band",
    ),
    ({"name": "difficulty", "low": 0.9, "min_groups": 1, "explore": 0.0}, "dropped", "difficulty/too_hard"),
    ({"name": "difficulty", "high": 0.1, "min_groups": 1, "explore": 0.0}, "dropped", "difficulty/too_easy"),
    ({"name": "length", "max_tokens": 3}, "dropped", "length/too_long"),
    ({"name": "length", "min_tokens": 4}, "dropped", "length/too_short"),
    ({"name": "overlong"}, "masked", "overlong"),
    ({"name": "truncated", "max_share": 0.0}, "dropped", "truncated"),
    ({"name": "repetition", "max_share": 0.0, "ngram": 1}, "masked", "repetition"),
    ({"name": "duplicate"}, "masked", "duplicate"),
    ({"name": "duplicate", "min_distinct": 4}, "dropped", "duplicate/few_distinct"),
    ({"name": "finite_reward"}, "dropped", "finite_reward/nan_reward"),
    ({"name": "min_live", "samples": 4}, "dropped", "min_live/failed_siblings"),
    ({"name": "quota", "shares": {"fake": 0.1}}, "dropped", "quota/over_quota"),
    ({"name": "importance_outliers", "max_log_ratio": 1.0}, "masked", "importance_outliers"),
]


class _Mixed(FakeGenerator):
    """Every third call is cut by the limit; every fourth gives one text to all; tokens repeat."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        call = self.calls
        completions = [replace(c, finished=call % 3 != 0) for c in await super().generate(request)]
        return [replace(completions[0]) for _ in completions] if call % 4 == 3 else completions


def reward(prompt: int, index: int) -> Reward:
    """Prompt 1 has a sample without a number for a reward; `flat` differs for odd prompts only."""
    value = float("nan") if (prompt, index) == (1, 0) else float(index % 2)
    return Reward(value, {"flat": float(index * (prompt % 2))})


def written(name: str, reasons: Sequence[str]) -> set[str]:
    return {reason if reason == name else f"{name}/{reason}" for reason in reasons}


def test_the_cases_below_are_all_reasons_of_all_built_ins() -> None:
    for kind, attribute in (("dropped", "drop_reasons"), ("masked", "mask_reasons")):
        declared = {r for name, cls in BUILT_IN.items() for r in written(name, getattr(cls, attribute))}
        assert {reason for _, this, reason in REASONS if this == kind} == declared
    assert {entry["name"] for entry, _, _ in REASONS} == set(BUILT_IN)


@pytest.mark.parametrize(("entry", "kind", "reason"), REASONS, ids=[reason for _, _, reason in REASONS])
def test_the_reason_of_every_built_in_is_in_ledger_summary_metrics_and_log(
    entry: dict[str, Any], kind: str, reason: str
) -> None:
    filter_ = build_filter(entry)
    outcome = simulate(
        simulated_config(run__steps=None, run__batches=6, rollout__max_staleness=2),
        task=FakeTask(8, reward),
        generators=[_Mixed(length=lambda call: 2 + call % 4)],
        filters=[filter_],
        rank_gap=lambda key: (2.0, 0.5) if key.endswith("g1") else (0.0, 0.0),
    )
    counts = outcome.ledger.by_reason(kind)
    assert counts.get(reason, 0) > 0
    summary = summarise(
        ledger=outcome.ledger,
        progress=outcome.progress,
        ending=outcome.ending,
        began_s=0,
        ended_s=1,
        data_plane_keys_left=0,
        bias_warning=0.9,
    )
    assert summary["ledger"][kind][reason] == counts[reason]
    logged = Counter(fate for event in outcome.of(Settled) for fate in event.fates)
    assert logged[f"{kind}:{reason}"] == counts[reason]
    name, word = filter_.name, reason.rpartition("/")[2]
    figures = outcome.controller.core._chain.metrics()
    last = outcome.of(StepEnded)[-1].metrics
    figure = f"filters/{name}/{'dropped_groups' if kind == 'dropped' else 'masked_samples'}/{word}"
    assert 0 < last[figure] <= figures[figure]
    if kind == "dropped":
        judged = Counter(event.dropped for event in outcome.of(Judged))
        assert figures[f"filters/{name}/dropped_groups/{word}"] == judged[reason]
    else:
        assert figures[f"filters/{name}/masked_samples/{word}"] >= counts[reason]


def test_each_kind_of_loss_counts_once_and_under_its_own_reason() -> None:
    """C14: among the first groups that end one is stale, one flat, one fails; three more are asked for."""
    rewards = FakeTask.in_order(lambda group, index: 1.0 if group == 1 else float(index % 2), prompts=64)

    def fail(call: int) -> None:
        if call == 2:
            raise RuntimeError("no answer")

    outcome = simulate(
        simulated_config(
            rollout__groups_per_step=3,
            rollout__max_staleness=1,
            run__steps=4,
            filters=[{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 3}],
        ),
        task=rewards,
        generators=[FakeGenerator(seconds=lambda call: 4.5 if call == 0 else 1.0, fail=fail)],
    )
    assert outcome.ending.code == 0
    first = {event.group: set(event.fates) for event in outcome.of(Settled)}
    assert (first[0], first[1], first[2]) == ({"dropped:stale"}, {"dropped:zero_std"}, {"failed:generation_error"})
    dropped = {reason: n for reason, n in outcome.ledger.by_reason("dropped").items() if reason != "run_ended"}
    assert dropped == {"stale": 4, "zero_std": 4}
    assert {batch.kept for batch in outcome.of(BatchJudged)} == {3}
    assert outcome.audit.faults == []


def test_length_bias_is_in_the_metrics_of_every_step_and_warns_once_the_window_is_full() -> None:
    takes = np.random.default_rng(3).lognormal(-0.5, 1.0, 5000)
    outcome = simulate(
        simulated_config(
            rollout__groups_per_step=8,
            rollout__group_size=2,
            run__steps=None,
            run__batches=60,
            collector__group_timeout_s=1e6,
            trainer__micro_batch_tokens=100_000,
        ),
        task=FakeTask(64),
        generators=[FakeGenerator(seconds=lambda n: float(takes[n]), length=lambda n: 2 + int(20 * takes[n]))],
        rank_seconds=lambda _: 1 / 3,
    )
    steps = [step.metrics for step in outcome.of(StepEnded)]
    warned = [step["staleness/length_bias_warning"] for step in steps]
    assert (warned[0], warned[-1]) == (0.0, 1.0)
    assert sorted(warned) == warned
    assert steps[-1]["staleness/recent_fresh_length_ratio"] < 0.9
    assert steps[-1]["staleness/lost_to_age_tokens"] > 0
    assert steps[-1]["staleness/mostly_lost_prompts"] > 0
    assert len({frozenset(step) for step in steps}) == 1
