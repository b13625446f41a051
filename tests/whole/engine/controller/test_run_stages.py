"""Stages in whole runs: several updates a batch, recomputed log-probabilities and a reference, in virtual time."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.configs import load, parse_set
from asyncrl.engine import metrics
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import Measured, Planned, Settled, StepEnded
from asyncrl.engine.records.columns import REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.testing.fakes import FakeGenerator, FakeRank
from asyncrl.engine.testing.simulation import simulate, simulated_config


@dataclass(slots=True)
class WritingRank(FakeRank):
    """Writes what its stages ask for, and reads it again in training."""

    works: list[Any] = field(default_factory=list)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        self.works.append(work)
        keys = [key for batch in work.micro_batches for key in batch.keys]
        if work.write and keys:
            await self.plane.write(PARTITION, work.column, {key: [1.0, key] for key in keys}, writer=self.name)
        return {} if work.reference else await FakeRank.logprobs(self, work)

    async def train(self, work: TrainWork) -> RankResult:
        self.works.append(work)
        keys = [key for batch in work.micro_batches for key in batch.keys]
        found = await self.plane.read(PARTITION, keys, work.columns)
        assert all(values == [[1.0, key] for key in keys] for values in found.values())
        return await FakeRank.train(self, work)


def run(steps: int = 3, **trainer: Any) -> Any:
    options = {f"trainer__{name}": value for name, value in trainer.items()}
    return simulate(simulated_config(run__steps=steps, trainer__ranks=2, **options), rank=WritingRank)


def stages_of(outcome: Any, step: int) -> list[str]:
    return [work.stage for work in outcome.ranks[0].works if work.step == step]


def test_by_default_a_step_is_one_stage_and_one_update() -> None:
    outcome = run()
    assert stages_of(outcome, 2) == ["train"]
    (work,) = [work for work in outcome.ranks[0].works if work.step == 2]
    assert (work.columns, work.updates, work.pad_to) == ((), (), 0)
    assert {sample.scale for sample in work.samples.values()} == {None}
    assert not outcome.of(Measured)


def test_stages_run_in_order_and_nothing_stays_in_the_plane() -> None:
    """log-probabilities, reference, training; the written columns go with their groups."""
    outcome = run(recompute_logprobs=True, reference_kl=0.1)
    assert outcome.ending.code == 0, outcome.ending
    for step in (1, 2, 3):
        assert stages_of(outcome, step) == ["logprobs", "reference_logprobs", "train"]
    train = [work for work in outcome.ranks[0].works if work.stage == "train"]
    assert {work.columns for work in train} == {(TRAINER_LOGPROBS, REFERENCE_LOGPROBS)}
    assert len(outcome.of(Measured)) == 3
    assert outcome.keys_left == []
    assert outcome.audit.faults == []


def test_forward_stages_have_a_budget_of_their_own_and_no_fillers() -> None:
    """Samples of 4 tokens: two of them in training's 10, five in the forward stages' 20."""
    outcome = run(recompute_logprobs=True, micro_batch_tokens=10, forward_tokens=20)
    by_stage: dict[str, list[int]] = {"logprobs": [], "train": []}
    for work in outcome.ranks[0].works:
        by_stage[work.stage] += [len(batch.keys) for batch in work.micro_batches]
        assert work.stage == "train" or not any(batch.filler for batch in work.micro_batches)
    assert max(by_stage["train"]) == 2
    assert max(by_stage["logprobs"]) > 2


def test_several_updates_share_out_a_batch_and_the_version_grows_by_one() -> None:
    outcome = run(updates_per_batch=2)
    assert [step.version for step in outcome.of(StepEnded)] == [1, 2, 3]
    assert {step.metrics[metrics.UPDATES] for step in outcome.of(StepEnded)} == {2}
    for step in (1, 2, 3):
        works = [w for rank in outcome.ranks for w in rank.works if w.stage == "train" and w.step == step]
        assert len({work.updates for work in works}) == 1
        assert [len(w.micro_batches) for w in works] == [sum(u.micro_batches for u in w.updates) for w in works]
        assert sum(update.tokens for update in works[0].updates) == works[0].total_tokens
        parts: list[set[str]] = [set(), set()]
        for work in works:
            start = 0
            for part, update in zip(parts, work.updates, strict=True):
                batches = work.micro_batches[start : start + update.micro_batches]
                part.update(key for batch in batches if not batch.filler for key in batch.keys)
                start += update.micro_batches
        assert not parts[0] & parts[1]
        assert len(parts[0] | parts[1]) == 8


@pytest.mark.parametrize("normalisation", ["sequence_mean", "constant"])
def test_scales_are_by_the_counts_of_their_update(normalisation: str) -> None:
    """With a reference, whose term is no multiple of the advantage, they travel by themselves."""
    outcome = run(updates_per_batch=2, reference_kl=0.1, loss_normalisation=normalisation)
    works = [w for rank in outcome.ranks for w in rank.works if w.stage == "train" and w.step == 1]
    for number, update in enumerate(works[0].updates):
        keys = set()
        for work in works:
            start = sum(u.micro_batches for u in work.updates[:number])
            batches = work.micro_batches[start : start + update.micro_batches]
            keys |= {key for batch in batches if not batch.filler for key in batch.keys}
        scales = {key: one.scale for work in works for key, one in work.samples.items() if key in keys}
        divisor = len(keys) * 2
        assert scales == pytest.approx(dict.fromkeys(keys, update.tokens / divisor))


def test_one_forward_length_goes_to_every_rank_of_a_step() -> None:
    outcome = run(pad_to_step_length=True)
    for step in (1, 2, 3):
        lengths = {work.pad_to for rank in outcome.ranks for work in rank.works if work.step == step}
        assert lengths == {4}


def test_figures_of_the_plan_are_always_there_and_finite() -> None:
    for options in ({}, {"packed": True, "updates_per_batch": 2, "pad_to_step_length": True}):
        for step in run(**options).of(StepEnded):
            for name in (metrics.PADDING_FRACTION, metrics.FILLER_FRACTION, metrics.BUBBLE_FRACTION):
                assert 0 <= step.metrics[name] < 1
            for name in (metrics.PREDICTED_SECONDS, metrics.RANK_SECONDS, metrics.PEAK_FRACTION, metrics.WEIGHT_MEAN):
                assert math.isfinite(step.metrics[name])


def test_forward_stages_take_their_time_from_the_step() -> None:
    """One second a stage here; the step's own seconds begin with its plan."""
    ended = run(recompute_logprobs=True).of(StepEnded)
    assert [step.metrics[metrics.FORWARD_SECONDS] for step in ended] == pytest.approx([1.0] * 3)
    assert [step.seconds for step in ended] == pytest.approx([1.0] * 3)


def test_a_sample_over_the_budget_is_masked_before_any_rank_starts_and_its_siblings_train() -> None:
    """D4: prompts of 2 tokens; 20 in all fit a budget of 20, 21 do not."""
    generator = FakeGenerator(length=lambda call: 19 if call == 1 else 18)
    config = simulated_config(
        run__steps=2, rollout__max_staleness=0, rollout__max_new_tokens=19, trainer__micro_batch_tokens=20
    )
    outcome = simulate(config, generators=[generator])
    fates = [event.fates for event in outcome.of(Settled)]
    assert ["masked:over_budget"] * 4 in fates
    trained = {key for event in outcome.of(Planned) for rank in event.ranks for micro in rank for key in micro}
    assert len(trained) == outcome.ledger.fates["trained"] == 4 * 3
    assert outcome.keys_left == []


def test_the_log_names_the_micro_batches_that_are_fillers() -> None:
    """Two groups of 4 samples, one per micro-batch, on 3 ranks: 8 micro-batches and a filler."""
    config = simulated_config(run__steps=1, trainer__ranks=3, trainer__micro_batch_tokens=20)
    outcome = simulate(config, generators=[FakeGenerator(length=lambda call: 16)], rank=WritingRank)
    (plan,) = outcome.of(Planned)
    given = [work.micro_batches for rank in outcome.ranks for work in rank.works]  # type: ignore[attr-defined]
    assert plan.fillers == 1
    assert list(plan.filler_places) == [
        (rank, place) for rank, batches in enumerate(given) for place, batch in enumerate(batches) if batch.filler
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.updates_per_batch=0", r"trainer\.updates_per_batch\) is 0; it must be an integer of at least 1"),
        ("trainer.reference_kl=-0.1", r"trainer\.reference_kl\) is -0\.1; it must be a number of at least 0"),
        ("trainer.importance_cap=0", r"trainer\.importance_cap\) is 0; it must be a number greater than 0"),
        ("trainer.forward_tokens=100", r"forward_tokens is 100 and trainer\.micro_batch_tokens 4096"),
        ("trainer.fetch_policy=each", r"must be one of independent, leader, auto"),
        (
            "trainer.fetch_policy=leader",
            r"fetch_policy is leader; it must be auto: with tensor_parallel",
        ),
    ],
)
def test_bad_values_are_named_with_their_range(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("default", [parse_set(given)])


def test_a_store_must_hold_the_columns_that_ranks_write() -> None:
    enough = load("default", [parse_set("data_plane.capacity_rows=48")]).config
    assert enough.data_plane.capacity_rows == 48
    with pytest.raises(ConfigError, match="columns that the ranks write 32 more"):
        load("default", [parse_set("data_plane.capacity_rows=48"), parse_set("trainer.recompute_logprobs=true")])
