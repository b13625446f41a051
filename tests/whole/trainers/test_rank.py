"""A step over several trainer ranks: the same loss, gradient, metrics and weights however it is cut."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.configs import load_config
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import Overdue
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.engine.weights.base import InProcess
from asyncrl.engine.weights.shared_file import SharedFile
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Alone, Meeting

CLIP = Clip(low=0.2, high=0.3, dual=3.0)
SMALL = load_config("default", {"model": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 24}}).model


def k3(gap: float) -> float:
    return math.exp(gap) - 1 - gap


def sums(outcome: Any) -> dict[str, float]:
    results = outcome.results
    names = ("loss", "ratio_sum", "clipped", "kl_sum", "tokens")
    return {name: sum(getattr(result, name) for result in results) for name in names}


def cut(*ranks: list[list[int]], fillers: int = 0) -> Callable[[Mapping[str, int]], Plan]:
    """Plan by hand: per rank, per micro-batch, sample numbers; then `fillers` more on every rank."""

    def plan(lengths: Mapping[str, int]) -> Plan:
        keys = list(lengths)
        extra = [MicroBatch((keys[0],), lengths[keys[0]], filler=True)] * fillers
        return Plan(
            tuple(
                tuple(
                    [MicroBatch(tuple(keys[i] for i in micro), sum(lengths[keys[i]] for i in micro)) for micro in rank]
                    + extra
                )
                for rank in ranks
            )
        )

    return plan


def test_loss_and_metrics_equal_a_plain_loop_over_tokens(
    causal_mean: Any, varied: Any, train_step: Any, logprobs_of: Any, per_token: Any
) -> None:
    outcome = train_step(causal_mean, varied, ranks=2, budget=12)
    parts = [
        per_token(logprob, logprob - sample.gap, sample.advantage, CLIP)
        for sample in varied
        for logprob in logprobs_of(causal_mean, sample).tolist()
    ]
    found = sums(outcome)
    assert found["tokens"] == len(parts)
    assert found["loss"] == pytest.approx(sum(p[0] for p in parts) / len(parts), abs=1e-12)
    assert found["ratio_sum"] == pytest.approx(sum(p[1] for p in parts), rel=1e-12)
    assert found["clipped"] == sum(p[2] for p in parts)
    assert found["kl_sum"] == pytest.approx(sum(p[3] for p in parts), rel=1e-12)


def test_withheld_tokens_are_context_alone(
    causal_mean: Any, varied: Any, train_step: Any, logprobs_of: Any, per_token: Any
) -> None:
    """Invariant 3, mode `tokens`: the leading tokens add nothing to the loss, the counts or the mean."""
    samples = [dataclasses.replace(sample, withheld=i % 3 * (len(sample.ids) > 5)) for i, sample in enumerate(varied)]
    outcome = train_step(causal_mean, samples, ranks=2, budget=12)
    parts = [
        per_token(logprob, logprob - sample.gap, sample.advantage, CLIP)
        for sample in samples
        for logprob in logprobs_of(causal_mean, sample).tolist()[sample.withheld :]
    ]
    found = sums(outcome)
    assert 0 < found["tokens"] == len(parts) < sum(len(sample.ids) - sample.prompt for sample in samples)
    assert found["loss"] == pytest.approx(sum(p[0] for p in parts) / len(parts), abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("budget", [10, 17, 1000])
def test_nothing_depends_on_ranks_or_micro_batches(
    causal_mean: Any, varied: Any, train_step: Any, ranks: int, budget: int
) -> None:
    """Invariant 7, float64: 1e-12."""
    whole = train_step(causal_mean, varied)
    outcome = train_step(causal_mean, varied, ranks=ranks, budget=budget)
    assert float(whole.gradient.abs().max()) > 1e-3
    torch.testing.assert_close(outcome.gradient, whole.gradient, rtol=0, atol=1e-12)
    assert sums(outcome) == pytest.approx(sums(whole), abs=1e-12)
    assert [result.grad_norm for result in outcome.results] == pytest.approx([whole.results[0].grad_norm] * ranks)
    for weights in outcome.weights:
        assert all(torch.equal(weights[name], outcome.weights[0][name]) for name in weights)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 1000), (2, 12), (3, 17)])
def test_the_entropy_is_of_trained_tokens_however_they_are_cut(
    causal_mean: Any, varied: Any, train_step: Any, ranks: int, budget: int
) -> None:
    """Against -sum p log p of each token's own distribution; withheld tokens and fillers add nothing."""
    samples = [dataclasses.replace(sample, withheld=i % 3 * (len(sample.ids) > 5)) for i, sample in enumerate(varied)]
    entropy = 0.0
    for sample in samples:
        logits = causal_mean(torch.tensor([sample.ids]), attention_mask=torch.ones(1), use_cache=False).logits[0]
        table = torch.softmax(logits[sample.prompt - 1 + sample.withheld : -1], -1)
        entropy -= float((table * table.log()).sum().detach())
    outcome = train_step(causal_mean, samples, ranks=ranks, budget=budget)
    assert sum(result.entropy_sum for result in outcome.results) == pytest.approx(entropy, abs=1e-12)


@pytest.fixture
def whole(causal_mean: Any, varied: Any, train_step: Any) -> Any:
    return train_step(causal_mean, varied)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=9, max_size=9), fillers=st.integers(0, 2)
)
def test_any_cut_with_any_fillers_gives_one_gradient(
    causal_mean: Any, varied: Any, train_step: Any, whole: Any, where: list[tuple[int, int]], fillers: int
) -> None:
    """Invariant 7: samples on random ranks and micro-batches; empty places are fillers."""

    def plan(lengths: Mapping[str, int]) -> Plan:
        keys = list(lengths)
        ranks = []
        for rank in range(3):
            cells = [[keys[i] for i, at in enumerate(where) if at == (rank, micro)] for micro in range(3)]
            ranks.append(
                tuple(
                    MicroBatch(tuple(cell), sum(lengths[key] for key in cell))
                    if cell
                    else MicroBatch((keys[0],), lengths[keys[0]], filler=True)
                    for cell in cells + [[]] * fillers
                )
            )
        return Plan(tuple(ranks))

    outcome = train_step(causal_mean, varied, ranks=3, plan=plan)
    torch.testing.assert_close(outcome.gradient, whole.gradient, rtol=0, atol=1e-12)
    assert sums(outcome) == pytest.approx(sums(whole), abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_in_float32_agrees_to_a_millionth(varied: Any, train_step: Any, ranks: int) -> None:
    """Invariant 7, float32: 1e-6; padding and attention masks change nothing."""
    model = build_model(SMALL, vocab_size=12, seed=3)
    whole = train_step(model, varied)
    outcome = train_step(model, varied, ranks=ranks, budget=12)
    torch.testing.assert_close(outcome.gradient, whole.gradient, rtol=0, atol=1e-6)
    assert sums(outcome) == pytest.approx(sums(whole), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        cut([[0, 1]]),
        cut([[0], [1]]),
        cut([[0]], [[1]]),
        cut([[0]], [[1]], fillers=3),
        cut([[1]], [[0]], fillers=1),
    ],
)
def test_the_loss_is_a_mean_over_all_tokens(
    causal_mean: Any, make_sample: Any, train_step: Any, plan: Callable[[Mapping[str, int]], Plan]
) -> None:
    """D11: one token with loss 1.0 on one rank, three with loss 0 on the other: 0.25, not 0.5."""
    samples = [make_sample((3, 4), 1, advantage=-1.0), make_sample((3, 5, 6, 7), 1, advantage=0.0)]
    outcome = train_step(causal_mean, samples, ranks=len(plan({"a": 2, "b": 4}).ranks), plan=plan)
    assert outcome.loss == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_metric_sums_are_over_tokens_and_fillers_add_none(
    causal_mean: Any, make_sample: Any, train_step: Any, micro_batches: int
) -> None:
    """I2's kind: ten tokens at one gap and two at another; a mean of means would be far off."""
    samples = [
        make_sample((2,) * 6, 1, 1.0, gap=0.1),
        make_sample((3,) * 6, 1, 1.0, gap=0.1),
        make_sample((4,) * 3, 1, 1.0, gap=0.9),
    ]

    def plan(lengths: Mapping[str, int]) -> Plan:
        if micro_batches == 1:
            return cut([[0, 1]], [[2]], fillers=1)(lengths)
        filler = MicroBatch(("v0_p0_g2",), lengths["v0_p0_g2"], filler=True)
        left, right = cut([[0], [1]], [[2], [2]])(lengths).ranks
        return Plan((left, (right[0], filler)))

    found = sums(train_step(causal_mean, samples, ranks=2, plan=plan))
    assert found["tokens"] == 12
    assert found["kl_sum"] / found["tokens"] == pytest.approx((10 * k3(0.1) + 2 * k3(0.9)) / 12, rel=1e-9)


def test_eight_samples_on_two_ranks_count_eight_times(causal_mean: Any, make_sample: Any, train_step: Any) -> None:
    """CASE-I3: gathered twice, each would count two times; the sums of one rank are those of two."""
    samples = [make_sample((2 + n,) * 4, 1, 1.0, gap=0.1 * n) for n in range(8)]
    alone, both = (sums(train_step(causal_mean, samples, ranks=ranks)) for ranks in (1, 2))
    assert alone["tokens"] == both["tokens"] == 8 * 3
    assert both["kl_sum"] == pytest.approx(alone["kl_sum"], rel=1e-9)
    assert alone["kl_sum"] == pytest.approx(sum(3 * k3(0.1 * n) for n in range(8)), rel=1e-9)


def test_an_empty_response_adds_nothing(causal_mean: Any, varied: Any, make_sample: Any, train_step: Any) -> None:
    """D13: a prompt-only sample beside others, and in a micro-batch of its own."""
    whole = train_step(causal_mean, varied)
    for ids in ((4, 5, 6), (4,)):
        samples = [*varied, make_sample(ids, len(ids), advantage=2.0)]
        for plan in (None, cut([[*range(9)], [9]])):
            outcome = train_step(causal_mean, samples, plan=plan)
            torch.testing.assert_close(outcome.gradient, whole.gradient, rtol=0, atol=1e-12)
            assert sums(outcome) == pytest.approx(sums(whole), abs=1e-12)


def test_a_batch_without_a_trainable_token_is_loss_zero(causal_mean: Any, make_sample: Any, train_step: Any) -> None:
    """D13: all masks zero: loss, counts and gradient norm are 0, nothing is NaN, the weights stay."""
    before = {name: value.clone() for name, value in causal_mean.state_dict().items()}
    outcome = train_step(causal_mean, [make_sample((4, 5), 2, 1.0), make_sample((6,), 1, -1.0)], ranks=2, budget=2)
    assert sums(outcome) == {"loss": 0, "ratio_sum": 0, "clipped": 0, "kl_sum": 0, "tokens": 0}
    assert [result.grad_norm for result in outcome.results] == [0.0, 0.0]
    assert all(torch.equal(outcome.weights[0][name], value) for name, value in before.items())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_the_ratio_of_an_unchanged_policy_is_one_at_any_temperature(
    causal_mean: Any, varied: Any, train_step: Any, temperature: float
) -> None:
    """CASE-G4: both sides divide by the temperature."""
    samples = [dataclasses.replace(sample, gap=0.0) for sample in varied]
    outcome = train_step(causal_mean, samples, ranks=2, budget=12, temperature=temperature)
    found = sums(outcome)
    assert found["ratio_sum"] / found["tokens"] == pytest.approx(1.0, abs=1e-12)
    assert found["clipped"] == 0


def test_what_is_offered_lets_go_of_what_was_offered_before(
    causal_mean: Any, make_backend: Any, tmp_path: Path
) -> None:
    """A second offer of one version keeps it, and so does a version that was sent meanwhile."""

    async def main() -> None:
        rank = TrainerRank(
            RankSettings(0, 1, "train", learning_rate=1.0),
            backend=make_backend(causal_mean),
            plane=LocalPlane(),
            reducer=Alone(),
            transport=SharedFile(tmp_path),
            blocking=in_place,
        )
        first, second = await rank.weights(), await rank.weights()
        for sent, again, kept in ((first, False, 2), (first, True, 2), (second, False, 1)):
            await rank.offer(sent, ["collector0"], again=again)
            assert len(list(tmp_path.iterdir())) == kept

    anyio.run(main)


def test_a_step_does_not_change_weights_that_were_sent_before(causal_mean: Any, make_backend: Any) -> None:
    backend = make_backend(causal_mean)
    handle = InProcess().send(backend.state()).content
    before = {name: value.clone() for name, value in handle.items()}
    backend.apply(torch.ones_like(backend.gradients()), learning_rate=0.1)
    assert all(torch.equal(handle[name], value) for name, value in before.items())
    assert not torch.equal(backend.state()["out.weight"], before["out.weight"])


def warm(model: Any, make_backend: Any, *, ranks: int, batch: int, steps: int = 4) -> tuple[list[float], TorchBackend]:
    """Take supervised steps on `ranks` copies of `model`; return the losses and the last rank's backend."""
    examples = [([1 + i % 5, 2 + i % 7, 3, 1], 1 + i % 2) for i in range(7)]

    async def main() -> tuple[list[float], TorchBackend]:
        meeting = Meeting(ranks, 60.0)
        backends = [make_backend(copy.deepcopy(model)) for _ in range(ranks)]
        losses: dict[int, float] = {}

        async def one(rank: int) -> None:
            member = TrainerRank(
                RankSettings(rank, ranks, "train", learning_rate=1.0),
                backend=backends[rank],
                plane=LocalPlane(),
                reducer=Alone() if ranks == 1 else meeting.member(rank),
                transport=InProcess(),
                blocking=in_place,
            )
            losses[rank] = await member.warm_up(examples, steps=steps, batch=batch, learning_rate=0.01)

        async with anyio.create_task_group() as tasks:
            for rank in range(ranks):
                tasks.start_soon(one, rank)
        return [losses[rank] for rank in range(ranks)], backends[-1]

    return run_virtual(main)


@pytest.mark.parametrize(("ranks", "batch"), [(2, 6), (3, 6), (3, 2), (4, 3)])
def test_the_warm_up_does_not_depend_on_the_number_of_ranks(
    causal_mean: Any, make_backend: Any, ranks: int, batch: int
) -> None:
    """Also with more ranks than examples in a batch."""
    (alone,), single = warm(causal_mean, make_backend, ranks=1, batch=batch)
    losses, shared = warm(causal_mean, make_backend, ranks=ranks, batch=batch)
    assert losses == pytest.approx([alone] * ranks, abs=1e-9)
    for name, value in single.state().items():
        torch.testing.assert_close(shared.state()[name], value, rtol=0, atol=1e-8)


def test_the_warm_up_lowers_the_loss_and_forgets_its_moments(causal_mean: Any, make_backend: Any) -> None:
    """The moments of supervised steps do not push the first step on rewards: a zero gradient moves nothing."""
    (first,), _ = warm(causal_mean, make_backend, ranks=1, batch=7, steps=1)
    (later,), backend = warm(causal_mean, make_backend, ranks=1, batch=7, steps=20)
    assert later < first
    before = {name: value.clone() for name, value in backend.state().items()}
    backend.apply(torch.zeros_like(backend.gradients()), learning_rate=0.01)
    assert all(torch.equal(backend.state()[name], value) for name, value in before.items())


def test_a_rank_that_waits_alone_gives_up_at_its_deadline() -> None:
    async def main() -> None:
        with pytest.raises(Overdue, match="rank 1 waited 5 s"):
            await Meeting(2, 5.0).member(1).sum(torch.ones(2))

    run_virtual(main)


def test_a_meeting_adds_each_round_by_itself() -> None:
    async def main() -> list[list[float]]:
        meeting = Meeting(3, 5.0)
        seen: list[list[float]] = [[], [], []]

        async def member(rank: int) -> None:
            for round_ in range(4):
                await anyio.sleep(rank)
                total = await meeting.member(rank).sum(torch.tensor([10.0**rank * (round_ + 1)]))
                seen[rank].append(float(total))
                total.zero_()

        async with anyio.create_task_group() as tasks:
            for rank in range(3):
                tasks.start_soon(member, rank)
        return seen

    assert run_virtual(main) == [[111.0, 222.0, 333.0, 444.0]] * 3
