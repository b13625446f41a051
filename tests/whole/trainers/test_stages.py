"""The stages of a batch on real ranks: columns by key, decoupled updates and the reference, against plain float64."""

import copy
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from asyncrl.engine.records.columns import REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from asyncrl.trainers.backends.base import DeviceSums, Rows, StepSums
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

CLIP = Clip(low=0.2, high=0.3, dual=3.0)
BUDGETS = {"micro_batch_tokens": 12, "forward_tokens": 20}


def with_gradient(model: Any, sample: Any) -> torch.Tensor:
    """Log-probabilities of one sample's response, from an unpadded row."""
    ids = torch.tensor([sample.ids])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    table = torch.log_softmax(logits, -1)
    return torch.stack([table[t - 1, sample.ids[t]] for t in range(sample.prompt, len(sample.ids))])


def drifted(model: Any, by: float) -> Any:
    """A copy with every weight a little off."""
    out = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.add_(by)
    return out


class Plain:
    """Trains a batch in one place: a loop over updates, samples and tokens. `sequence_mean` normalisation."""

    def __init__(self, policy: Any, outcome: Any, *, cap: float, reference: Any = None, kl: float = 0.0) -> None:
        self.policy, self.outcome, self.kl = policy, outcome, kl
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        with torch.no_grad():
            self.old = {key: with_gradient(policy, sample) for key, sample in outcome.samples.items()}
            frozen = reference or policy
            self.reference = {key: with_gradient(frozen, sample) for key, sample in outcome.samples.items()}
        self.cap = cap
        self.losses: list[float] = []
        self.norms: list[float] = []

    def sample_loss(self, key: str) -> torch.Tensor:
        sample = self.outcome.samples[key]
        losses = []
        for t, logprob in enumerate(with_gradient(self.policy, sample)):
            if t not in sample.trained:
                continue
            weight = min(math.exp(self.old[key][t] - self.outcome.behaviour[key][t]), self.cap)
            ratio = (logprob - self.old[key][t]).exp()
            gain = torch.minimum(ratio * sample.advantage, ratio.clamp(1 - CLIP.low, 1 + CLIP.high) * sample.advantage)
            if sample.advantage < 0:
                gain = torch.clamp(gain, min=CLIP.dual * sample.advantage)
            away = self.reference[key][t] - logprob
            losses.append(-weight * gain + self.kl * (away.exp() - 1 - away))
        return torch.stack(losses).mean()

    def train(self, updates: Sequence[Any]) -> None:
        for keys in updates:
            loss = torch.stack([self.sample_loss(key) for key in sorted(keys)]).mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)))
            self.optimizer.step()
            self.losses.append(float(loss.detach()))


def check_weights(found: Sequence[dict[str, torch.Tensor]], expected: Any) -> None:
    """AdamW divides a gradient by its own size, so rounding errors of the smallest ones are seen in the weights."""
    for weights in found:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("updates", [1, 3])
def test_decoupled_updates_with_a_reference_equal_a_plain_loop(
    causal_mean: Any, varied: Any, run_batch: Any, ranks: int, updates: int
) -> None:
    """Losses, norms and weights over all updates, each normalised by its own counts."""
    samples = [replace(sample, withheld=i % 3 * (len(sample.ids) > 5)) for i, sample in enumerate(varied)]
    outcome = run_batch(
        causal_mean,
        samples,
        drift=0.02,
        ranks=ranks,
        updates_per_batch=updates,
        recompute_logprobs=True,
        importance_cap=1.3,
        reference_kl=0.7,
        loss_normalisation="sequence_mean",
        **BUDGETS,
    )
    plain = Plain(drifted(causal_mean, 0.02), outcome, cap=1.3, reference=causal_mean, kl=0.7)
    assert len(outcome.plan.parts) == updates
    plain.train([part.keys for part in outcome.plan.parts])
    check_weights(outcome.weights, plain.policy)
    assert sum(r.loss for r in outcome.results) == pytest.approx(sum(plain.losses) / updates, abs=1e-12)
    assert outcome.results[0].grad_norm == pytest.approx(sum(plain.norms) / updates, abs=1e-12)
    assert min(plain.norms) > 1e-2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_that_were_not_generated_are_context_alone(
    small_llama: Any, make_sample: Any, run_batch: Any, ranks: int, packed: bool
) -> None:
    """G7: several generated places per response, beside withheld tokens; weights, loss, counts and gaps.

    The log-probabilities of the other tokens are far off, as they are where 0.0 is written.
    """
    places = [((0, 2), (4, 5), (7, 9)), ((1, 3),), (), ((0, 3), (5, 6)), ((2, 4), (8, 9)), ((0, 9),)]
    samples = [
        make_sample(tuple(range(1, 12)), 2, (-1.0) ** i * (0.4 + 0.1 * i), 0.1 * i, withheld, generated)
        for i, (generated, withheld) in enumerate(zip(places, [0, 0, 2, 1, 3, 0], strict=True))
    ]
    outcome = run_batch(
        small_llama,
        samples,
        drift=0.02,
        ranks=ranks,
        packed=packed,
        micro_batch_tokens=24,
        recompute_logprobs=True,
        reference_kl=0.7,
        loss_normalisation="sequence_mean",
        hide_not_generated=True,
    )
    plain = Plain(drifted(small_llama, 0.02), outcome, cap=2.0, reference=small_llama, kl=0.7)
    plain.train([list(outcome.samples)])
    check_weights(outcome.weights, plain.policy)
    assert sum(r.loss for r in outcome.results) == pytest.approx(plain.losses[0], abs=1e-12)
    assert sum(r.tokens for r in outcome.results) == 5 + 2 + 7 + 3 + 2 + 9
    for key, sample in outcome.samples.items():
        away = [float(plain.old[key][t] - outcome.behaviour[key][t]) for t in sample.trained]
        expected = max(map(abs, away)), sum(away) / len(away)
        assert outcome.gaps[key] == pytest.approx(expected, abs=1e-12)


def test_several_updates_recompute_the_old_policy_unasked(causal_mean: Any, varied: Any, run_batch: Any) -> None:
    """Else later updates would be clipped around a policy that the first one has left."""
    outcome = run_batch(causal_mean, varied, updates_per_batch=2, loss_normalisation="sequence_mean", **BUDGETS)
    plain = Plain(copy.deepcopy(causal_mean), outcome, cap=2.0)
    plain.train([part.keys for part in outcome.plan.parts])
    check_weights(outcome.weights, plain.policy)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_importance_and_reference_metrics_do_not_depend_on_the_cut(
    causal_mean: Any, varied: Any, run_batch: Any, ranks: int
) -> None:
    """Invariant 7; and each against the closed form of its k3, mean and share."""
    options = {"recompute_logprobs": True, "reference_kl": 0.1, "importance_cap": 1.3, "drift": 0.02}
    outcome = run_batch(causal_mean, varied, ranks=ranks, **options, **BUDGETS)
    plain = Plain(drifted(causal_mean, 0.02), outcome, cap=1.3, reference=causal_mean)
    weights, aways = [], []
    for key in outcome.samples:
        weights += (plain.old[key] - outcome.behaviour[key]).exp().tolist()
        aways += (plain.reference[key] - plain.old[key]).tolist()

    def total(name: str) -> float:
        return float(sum(getattr(result, name) for result in outcome.results))

    assert total("weight_sum") == pytest.approx(sum(weights), abs=1e-12)
    assert total("used_weight_sum") == pytest.approx(sum(min(w, 1.3) for w in weights), abs=1e-12)
    assert 0 < total("truncated") == sum(w > 1.3 for w in weights) < len(weights)
    assert total("reference_kl_sum") == pytest.approx(sum(math.exp(a) - 1 - a for a in aways), abs=1e-12)
    assert total("reference_kl_sum") > 1e-4


def test_without_a_coefficient_no_reference_is_kept(causal_mean: Any, make_backend: Any) -> None:
    assert make_backend(causal_mean)._reference is None
    with_one = make_backend(causal_mean, reference_kl=0.1)
    assert with_one._reference is not None
    assert not any(p.requires_grad for p in with_one._reference.parameters())


def test_the_reference_is_what_the_warm_up_left_and_no_step_moves_it(causal_mean: Any, make_backend: Any) -> None:
    backend = make_backend(causal_mean, reference_kl=0.1)
    rows = Rows([torch.tensor([1, 2, 3])], (), [1], [0.0], [0], filler=False)
    backend.apply(torch.ones_like(backend.gradients()), learning_rate=0.1)
    backend.freeze_reference()
    frozen = backend.logprobs(rows, reference=True)[0]
    assert torch.equal(frozen, backend.logprobs(rows)[0])
    backend.apply(torch.ones_like(backend.gradients()), learning_rate=0.1)
    assert torch.equal(frozen, backend.logprobs(rows, reference=True)[0])
    assert not torch.equal(frozen, backend.logprobs(rows)[0])


class Numbering(TorchBackend):
    """Says, as the log-probability of every token, the number of the sample: its first id."""

    def logprobs(self, rows: Rows, *, reference: bool = False) -> list[torch.Tensor]:
        sizes = zip(rows.tokens, rows.prompt_tokens, strict=True)
        return [torch.full((len(ids) - n,), float(ids[0]) + 100 * reference, dtype=torch.float64) for ids, n in sizes]

    def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
        assert rows.proximal_logprobs is not None
        assert rows.reference_logprobs is not None
        for ids, old, frozen in zip(rows.tokens, rows.proximal_logprobs, rows.reference_logprobs, strict=True):
            assert set(old.tolist()) == {float(ids[0])}
            assert set(frozen.tolist()) == {float(ids[0]) + 100}
        tokens = 0 if rows.filler else sum(len(ids) for ids in rows.tokens) - sum(rows.prompt_tokens)
        return DeviceSums(torch.tensor(astuple(StepSums(tokens=tokens)), dtype=torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_come_back_by_key_and_in_the_order_of_the_caller(
    causal_mean: Any, make_sample: Any, run_batch: Any, ranks: int
) -> None:
    """D9: lengths as in D8; the log-probability of every token is its sample's number; the stages reorder rows."""
    samples = [
        make_sample((i + 1, *[1] * length), 1, advantage=1.0) for i, length in enumerate([9, 1, 8, 2, 7, 3, 6, 4])
    ]

    def make(model: Any, **options: Any) -> Numbering:
        settings = TorchSettings(1.0, CLIP, (0.9, 0.95), 0.0, 1.0, **options)
        return Numbering(model, settings, pad_id=0)

    outcome = run_batch(
        causal_mean,
        samples,
        group_size=8,
        ranks=ranks,
        make=make,
        recompute_logprobs=True,
        reference_kl=0.1,
        micro_batch_tokens=15,
    )
    measured = [key for rank in outcome.forward for micro in rank for key in micro.keys]
    # On two ranks the balanced order happens to be that of the keys.
    assert ranks == 2 or measured != sorted(measured)
    assert list(outcome.gaps) == list(outcome.samples)
    for i, (key, sample) in enumerate(outcome.samples.items(), 1):
        assert outcome.columns[TRAINER_LOGPROBS][key].tolist() == [float(i)] * (len(sample.ids) - 1)
        assert outcome.columns[REFERENCE_LOGPROBS][key].tolist() == [100.0 + i] * (len(sample.ids) - 1)
        expected = (i - outcome.behaviour[key]).abs().max()
        assert outcome.gaps[key][0] == pytest.approx(float(expected), abs=1e-12)


def test_the_columns_are_log_probabilities_at_the_start_of_the_batch(
    causal_mean: Any, varied: Any, run_batch: Any, logprobs_of: Any
) -> None:
    """Also with several updates: none of them moves what was written."""
    outcome = run_batch(causal_mean, varied, drift=0.02, ranks=2, updates_per_batch=3, reference_kl=0.1, **BUDGETS)
    policy = drifted(causal_mean, 0.02)
    for key, sample in outcome.samples.items():
        found = outcome.columns
        torch.testing.assert_close(found[TRAINER_LOGPROBS][key], logprobs_of(policy, sample), rtol=0, atol=1e-12)
        torch.testing.assert_close(found[REFERENCE_LOGPROBS][key], logprobs_of(causal_mean, sample), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_reads_each_of_its_groups_once(causal_mean: Any, varied: Any, run_batch: Any, ranks: int) -> None:
    """Though it has several micro-batches, with samples of one group in different ones."""
    outcome = run_batch(causal_mean, varied, ranks=ranks, micro_batch_tokens=12)
    groups_of_ranks = [{key[:-3] for micro in rank for key in micro.keys} for rank in outcome.plan.ranks]
    assert max(len(rank) for rank in outcome.plan.ranks) > 2
    reads = [key[:-3] for keys in outcome.reads for key in dict.fromkeys(k[:-3] + "_gX" for k in keys)]
    assert sorted(reads) == sorted(group for groups in groups_of_ranks for group in groups)


def test_a_rank_without_samples_has_nothing_to_do_in_forward_stages(
    causal_mean: Any, make_sample: Any, run_batch: Any
) -> None:
    """No filler there; in training it has one, and the weights stay equal."""
    one = [make_sample((1, 2, 3), 1, advantage=1.0)]
    outcome = run_batch(causal_mean, one, group_size=1, ranks=2, recompute_logprobs=True, reference_kl=0.1)
    assert sorted(len(batches) for batches in outcome.forward) == [0, 1]
    assert [sum(batch.filler for batch in rank) for rank in outcome.plan.ranks].count(1) == 1
    assert all(torch.equal(value, outcome.weights[1][name]) for name, value in outcome.weights[0].items())


@pytest.mark.parametrize("packed", [False, True])
def test_padding_to_one_length_changes_nothing_but_the_length(
    varied: Any, run_batch: Any, small_llama: Any, packed: bool
) -> None:
    model, seen = copy.deepcopy(small_llama), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True)
    # Behaviour log-probabilities are taken sample by sample; what comes after is the ranks'.
    options = {"ranks": 2, "packed": packed, **BUDGETS}
    own = run_batch(model, varied, **options)
    assert len(set(seen[len(varied) :])) > 1
    seen.clear()
    one = run_batch(model, varied, pad_to_step_length=True, **options)
    assert len(set(seen[len(varied) :])) == 1
    for mine, other in zip(own.weights, one.weights, strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-9)
