"""A model split over ranks gives the PyTorch backend's log-probabilities, loss, gradients and updated weights."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows, StepSums, TrainingState
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split

FAMILIES = ("llama", "llama3", "tied", "qwen2", "qwen3")
SPLITS = {
    "dp2": (2, Split()),
    "tp2": (2, Split(tensor=2)),
    "pp2": (2, Split(pipeline=2)),
    "dp2tp2": (4, Split(tensor=2)),
    "tp2pp2": (4, Split(tensor=2, pipeline=2)),
}
CASES = [(split, family) for split in ("dp2", "tp2", "pp2", "dp2tp2") for family in FAMILIES]
CASES += [("tp2pp2", "tied"), ("dp1", "qwen3_moe"), ("ep2", "qwen3_moe"), ("dp4ep2", "qwen3_moe"), ("pp2", "qwen3_moe")]
SPLITS |= {"dp1": (1, Split()), "ep2": (2, Split(expert=2)), "dp4ep2": (4, Split(expert=2))}
TOTAL = 20
RATE = 1e-3


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Float32 sums in another order, of values as large as the largest."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=max(tolerance * scale, 1e-9))


def total(found: Sequence[StepSums]) -> StepSums:
    sums = StepSums()
    for one in found:
        sums.add(one)
    return sums


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("split", "family"), CASES)
def test_a_split_model_trains_as_a_whole_one(
    world: Any,
    model: Any,
    batches: list[Rows],
    make_settings: Any,
    torch_backend: Any,
    split: str,
    family: str,
    packed: bool,
) -> None:
    """Two updates: the second one is of moments and weights that the first one made, and the first is clipped."""
    ranks, how = SPLITS[split]
    ours, whole = world(ranks), model(family)
    settings = make_settings(how, packed=packed)
    reference = torch_backend(whole, settings)
    ours.each("build", whole.config, dict(whole.state_dict()), settings)
    mine = ours.shares(batches, how)
    for i in range(len(mine[0])):
        answers = ours.apart("logprobs", [(own[i],) for own in mine])
        for rank, answer in enumerate(answers):
            for found, expected in zip(answer, reference.logprobs(mine[rank][i]), strict=True):
                close(found, expected)
    parts = how.tensor * how.pipeline
    # Adam makes as large a change of a gradient that is nothing but rounding, so the second update is less alike.
    for tolerance in (2e-5, 5e-4):
        expected = total([reference.accumulate(rows, TOTAL).read() for rows in batches])
        sums, norms = ours.update(batches, how, learning_rate=RATE, total=TOTAL)
        # Every rank of a replica is told the same.
        assert all(len({repr(step[rank]) for rank in range(ranks)}) <= ranks // parts for step in sums)
        found = total([one for step in sums for one in step])
        for one in fields(StepSums):
            value = getattr(found, one.name) / parts
            assert value == pytest.approx(getattr(expected, one.name), rel=20 * tolerance, abs=1e-4), one.name
        norm = reference.apply(reference.gradients(), learning_rate=RATE)
        assert norms == pytest.approx([norm] * ranks, rel=tolerance)
        same_moments(ours.each("training_state")[0], reference.training_state(), tolerance)
    for state in ours.each("state"):
        for name, value in reference.state().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=RATE / 5)


def same_moments(found: TrainingState, expected: TrainingState, tolerance: float) -> None:
    """Moments after the first update are its gradients; those of Qwen3's norms of heads are among them."""
    assert set(found.tensors) == set(expected.tensors)
    for name, value in expected.tensors.items():
        if not name.startswith("weights/"):
            close(found.tensors[name], value, tolerance)


@pytest.mark.parametrize("split", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_weights_come_back_bit_for_bit(
    world: Any, model: Any, make_settings: Callable[..., MegatronSettings], split: str, family: str
) -> None:
    """A vocabulary of 37 is padded to 38 for two tensor parts, and negative zeros stay negative."""
    ranks, how = SPLITS[split]
    whole = model(family)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.view(-1)[::7] = -0.0
    ours = world(ranks)
    ours.each("build", whole.config, dict(whole.state_dict()), make_settings(how))
    for state in ours.each("state"):
        assert set(state) == set(whole.state_dict())
        for name, value in whole.state_dict().items():
            assert torch.equal(state[name].view(torch.int32), value.view(torch.int32)), name
        tied = state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
        assert tied == whole.config.tie_word_embeddings
