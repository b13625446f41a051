"""What a Megatron backend does beside a plain update: recompute, refuse gradients, keep a reference, warm up."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.megatron.settings import Split

TP2, PP2 = Split(tensor=2), Split(pipeline=2)


def moments(world: Any) -> dict[str, torch.Tensor]:
    return dict(world.each("training_state")[0].tensors)


@pytest.mark.parametrize("split", [TP2, PP2], ids=["tp2", "pp2"])
def test_recomputed_layers_and_chunks_of_logits_change_nothing(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, split: Split
) -> None:
    whole, ours = model("qwen3"), world(2)
    found = []
    for options in ({}, {"recompute": True, "chunk": 3}):
        ours.each("build", whole.config, dict(whole.state_dict()), make_settings(split, packed=True, **options))
        ours.update(batches, split, learning_rate=0.01)
        found.append(moments(ours))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(
    world: Any, model: Any, batches: list[Rows], make_settings: Any
) -> None:
    """Invariant 10: weights and moments stay, on all ranks; the next update is as if it had not been."""
    whole, ours = model("llama"), world(2)
    ours.each("build", whole.config, dict(whole.state_dict()), make_settings(TP2))
    ours.update(batches, TP2, learning_rate=0.01)
    before = moments(ours)
    bad = replace(batches[0], advantages=[float("nan")] * 3)
    with pytest.raises(FloatingPointError, match="left as they are"):
        ours.update([bad], TP2, learning_rate=0.01)
    for name, value in moments(ours).items():
        assert torch.equal(value, before[name]), name
    ours.update(batches, TP2, learning_rate=0.01)
    after = moments(ours)
    ours.each("build", whole.config, dict(whole.state_dict()), make_settings(TP2))
    for _ in range(2):
        ours.update(batches, TP2, learning_rate=0.01)
    for name, value in moments(ours).items():
        assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("split", [TP2, PP2], ids=["tp2", "pp2"])
def test_a_filler_runs_and_adds_nothing(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, split: Split
) -> None:
    whole, ours = model("tied"), world(2)
    ours.each("build", whole.config, dict(whole.state_dict()), make_settings(split))
    sums, norms = ours.update([replace(batches[0], filler=True)], split, learning_rate=0.01)
    assert (sums[0][0].loss, sums[0][0].tokens, norms) == (0, 0, [0.0, 0.0])


@pytest.mark.parametrize("split", [TP2, PP2], ids=["tp2", "pp2"])
def test_the_reference_keeps_its_weights_and_pulls_the_policy(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, torch_backend: Any, split: Split
) -> None:
    whole, ours = model("qwen2"), world(2)
    settings = make_settings(split, reference_kl=0.3)
    reference = torch_backend(whole, settings)
    ours.each("build", whole.config, dict(whole.state_dict()), settings)
    for _ in range(2):
        frozen = ours.each("logprobs", batches[0], reference=True)[1]
        for found, expected in zip(frozen, reference.logprobs(batches[0], reference=True), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        rows = replace(batches[0], reference_logprobs=frozen)
        expected_sums = reference.accumulate(rows, 10).read()
        reference.apply(reference.gradients(), learning_rate=0.01)
        sums, _ = ours.update([rows], split, learning_rate=0.01, total=10)
        assert sums[0][0].reference_kl == pytest.approx(expected_sums.reference_kl, rel=1e-2, abs=1e-5)
        assert sums[0][0].loss == pytest.approx(expected_sums.loss, rel=1e-2, abs=1e-5)
    # The second update was of another policy than the reference.
    assert expected_sums.reference_kl > 1e-4


def test_supervised_steps_and_a_new_optimizer(world: Any, model: Any, make_settings: Any, torch_backend: Any) -> None:
    whole, ours = model("llama"), world(2)
    settings = make_settings(PP2, decay_vectors=False)
    reference = torch_backend(whole, settings)
    ours.each("build", whole.config, dict(whole.state_dict()), settings)
    tokens = [torch.tensor([1, 5, 9, 2]), torch.tensor([3, 3, 7])]
    for _ in range(2):
        expected = reference.accumulate_supervised(tokens, [2, 1], 4)
        assert ours.each("accumulate_supervised", tokens, [2, 1], 4) == pytest.approx([expected] * 2, rel=1e-5)
        reference.apply(reference.gradients(), learning_rate=0.001)
        ours.each("gradients")
        ours.each("apply", torch.zeros(0), learning_rate=0.001)
    for name, value in reference.state().items():
        torch.testing.assert_close(ours.each("state")[1][name], value, rtol=0, atol=2e-4)
    ours.each("reset_optimizer")
    assert not [name for name in moments(ours) if name.startswith("optimizer/")]


@pytest.mark.parametrize("split", [TP2, PP2, Split()], ids=["tp2", "pp2", "dp2"])
def test_in_bfloat16_masters_and_moments_are_float32(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, torch_backend: Any, split: Split
) -> None:
    """Weights that are no bfloat16 numbers are not rounded for the optimizer, and its small updates are not lost."""
    whole, ours = model("qwen3"), world(2)
    settings = make_settings(split)
    ours.each("build", whole.config, dict(whole.state_dict()), settings, torch.bfloat16)
    for name, value in ours.each("state")[1].items():
        assert torch.equal(value, whole.state_dict()[name].to(torch.bfloat16)), name
    for name, value in whole.state_dict().items():
        assert torch.equal(moments(ours)[f"weights/{name}"], value), name
    reference = torch_backend(whole, settings)
    sums, norms = ours.update(batches, split, learning_rate=1e-5)
    loss = sum(reference.accumulate(rows, 20).read().loss for rows in batches)
    parts = split.tensor * split.pipeline
    assert sum(one.loss for step in sums for one in step) / parts == pytest.approx(loss, rel=0.05, abs=0.02)
    assert norms[0] == pytest.approx(reference.apply(reference.gradients(), learning_rate=1e-5), rel=0.05)
    expected = reference.training_state().saved
    for name, value in moments(ours).items():
        assert value.dtype == torch.float32
        if name.startswith("weights/"):
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=2.1e-5)
