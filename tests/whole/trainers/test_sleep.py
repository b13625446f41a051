"""A backend that leaves its device between steps trains, saves and publishes as one that stays."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.rank_state.keeper import StateKeeper

Make = Callable[..., TorchBackend]
OPTIONS = {
    "plain": {},
    "reference": {"reference_kl": 0.1},
    "bfloat16": {"low_weights": True, "compute_dtype": torch.bfloat16},
    "host": {"offload": True},
}


def step(backend: TorchBackend, samples: Any, *, reference: bool = False) -> None:
    rows = Rows(
        [torch.tensor(sample.ids) for sample in samples],
        [torch.zeros(len(sample.ids) - sample.prompt) for sample in samples],
        [sample.prompt for sample in samples],
        [sample.advantage for sample in samples],
        [0] * len(samples),
        filler=False,
    )
    if reference:
        frozen = backend.logprobs(rows, reference=True)
        rows = replace(rows, reference_logprobs=frozen, scales=[1.0] * len(samples))
    backend.accumulate(rows, 10)
    backend.apply(backend.gradients(), learning_rate=1e-2)


def addresses(backend: TorchBackend) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in backend.training_state().saved.items()}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_with_a_sleep_between_are_equal_to_the_bit(
    small_llama: Any, varied: Any, make_backend: Make, options: dict[str, Any]
) -> None:
    start = copy.deepcopy(small_llama).float()
    stays, sleeps = (make_backend(copy.deepcopy(start), **options) for _ in range(2))
    for _ in range(3):
        sleeps.sleep()
        sleeps.wake()
        for backend in (stays, sleeps):
            step(backend, varied, reference="reference_kl" in options)
    awake = addresses(sleeps)
    sleeps.sleep()
    left = addresses(sleeps)
    moved = {name for name in awake if awake[name] != left[name]}
    assert moved == set(awake)
    for name, tensor in stays.training_state().saved.items():
        assert torch.equal(tensor, sleeps.training_state().saved[name]), name
    for name, tensor in stays.state().items():
        assert torch.equal(tensor, sleeps.state()[name]), name
    sleeps.wake()


def test_a_state_that_is_held_in_sleep_is_the_one_before_it(
    small_llama: Any, varied: Any, make_backend: Make, tmp_path: Path
) -> None:
    """It is written while the rank wakes and steps on."""
    start = copy.deepcopy(small_llama).float()
    backend, other = (make_backend(copy.deepcopy(start), reference_kl=0.1) for _ in range(2))
    step(backend, varied, reference=True)
    keeper = StateKeeper(0, 1)
    backend.sleep()
    keeper.hold(backend, 1)
    expected = {name: tensor.detach().clone() for name, tensor in backend.training_state().saved.items()}
    backend.wake()
    step(backend, varied, reference=True)
    keeper.save(tmp_path)
    assert StateKeeper(0, 1).load(tmp_path, other) == 1
    for name, tensor in other.training_state().saved.items():
        assert torch.equal(tensor, expected[name]), name
