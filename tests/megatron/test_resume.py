"""A saved state continues bit for bit, in the same split, in another one, and from the PyTorch backend's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.megatron.settings import Split
from asyncrl.trainers.rank_state.keeper import StateKeeper

RATE = 0.001


def tensors(world: Any) -> dict[str, torch.Tensor]:
    return dict(world.each("training_state")[0].saved)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("tied", (2, Split(tensor=2)), (2, Split(tensor=2))),
        ("qwen3", (2, Split(tensor=2)), (2, Split())),
        ("qwen2", (2, Split(pipeline=2)), (4, Split(tensor=2))),
        ("qwen3_moe", (2, Split(expert=2)), (4, Split(expert=2))),
    ],
    ids=["the same", "tp2 to dp2", "pp2 to dp2tp2", "ep2 to dp4ep2"],
)
def test_three_updates_are_those_of_a_run_that_was_saved_in_between(
    world: Any,
    model: Any,
    batches: list[Rows],
    make_settings: Any,
    tmp_path: Path,
    family: str,
    before: tuple[int, Split],
    after: tuple[int, Split],
) -> None:
    """Two updates come after: a step of Adam that was lost would show in the second only."""
    whole, weights = model(family), dict(model(family).state_dict())
    options = {"reference_kl": 0.1} if family == "tied" else {}
    first, then = world(before[0]), world(after[0])
    first.each("build", whole.config, weights, make_settings(before[1], **options))
    first.update(batches, before[1], learning_rate=RATE)
    first.each("save", str(tmp_path))
    for _ in range(2):
        first.update(batches, before[1], learning_rate=RATE)
    expected = tensors(first)
    # Another start: all of it must come from the saved state.
    weights = {name: value + 1 for name, value in weights.items()}
    then.each("build", whole.config, weights, make_settings(after[1], **options))
    then.each("load", str(tmp_path))
    for _ in range(2):
        then.update(batches, after[1], learning_rate=RATE)
    found = tensors(then)
    assert set(found) == set(expected)
    for name, value in expected.items():
        if before == after:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=0, atol=3e-4 * max(1e-3, float(value.abs().max())))


def test_what_the_pytorch_backend_saved_continues_split(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, torch_backend: Any, tmp_path: Path
) -> None:
    whole, weights = model("qwen3"), dict(model("qwen3").state_dict())
    settings = make_settings(Split(tensor=2))
    reference = torch_backend(whole, settings)

    def update() -> None:
        for rows in batches:
            reference.accumulate(rows, 20)
        reference.apply(reference.gradients(), learning_rate=RATE)

    update()
    keeper = StateKeeper(0, 1)
    keeper.hold(reference, 1)
    keeper.save(tmp_path)
    ours = world(2)
    ours.each("build", whole.config, {name: value + 1 for name, value in weights.items()}, settings)
    ours.each("load", str(tmp_path))
    for name, value in reference.training_state().saved.items():
        assert torch.equal(tensors(ours)[name], value), name
    update()
    ours.update(batches, settings.split, learning_rate=RATE)
    found = tensors(ours)
    for name, value in reference.training_state().saved.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-4 * max(1e-3, float(value.detach().abs().max())))
