"""bfloat16: what is rounded and what is not; the trainer beside a generator that holds rounded weights."""

import copy
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend

Make = Callable[..., TorchBackend]
HALF = torch.bfloat16
# Two roundings of 2^-9 in logits of size 1.
ROUNDING = 0.02


def rows_of(samples: Any, logprobs: Any = ()) -> Rows:
    return Rows(
        [torch.tensor(sample.ids) for sample in samples],
        logprobs or [torch.zeros(len(sample.ids) - sample.prompt) for sample in samples],
        [sample.prompt for sample in samples],
        [sample.advantage for sample in samples],
        [0] * len(samples),
        filler=False,
    )


@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_in_bfloat16_is_near_and_weights_and_gradients_stay_float32(
    small_llama: Any, varied: Any, make_backend: Make, packed: bool
) -> None:
    model = copy.deepcopy(small_llama).float()
    exact = make_backend(copy.deepcopy(model)).logprobs(rows_of(varied))
    backend = make_backend(model, packed=packed, compute_dtype=HALF)
    found = backend.logprobs(rows_of(varied))
    assert not torch.equal(torch.cat(found), torch.cat(exact))
    torch.testing.assert_close(torch.cat(found), torch.cat(exact), rtol=0, atol=ROUNDING)
    backend.accumulate(rows_of(varied, exact), 10)
    gradients = backend.gradients()
    assert gradients.dtype == torch.float32
    reference = make_backend(copy.deepcopy(model))
    reference.accumulate(rows_of(varied, exact), 10)
    right = reference.gradients()
    assert float((gradients - right).norm() / right.norm()) < ROUNDING
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_updates_too_small_for_bfloat16_add_up(small_llama: Any, make_backend: Make) -> None:
    """A hundred steps of 1e-5: every one of them is below the spacing of a rounded weight of size 0.1."""
    model = copy.deepcopy(small_llama).float()
    before = model.lm_head.weight.detach().clone()
    backend = make_backend(model, compute_dtype=HALF, betas=(0.1, 0.1))
    for _ in range(100):
        backend.apply(torch.ones_like(backend.gradients()), learning_rate=1e-5)
    moved = before - model.lm_head.weight.detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-2, atol=0)


def test_what_is_published_is_rounded_and_buffers_are_not(small_llama: Any, make_backend: Make) -> None:
    model = copy.deepcopy(small_llama).float()
    model.register_buffer("bias", torch.full((1,), 0.1))
    state = make_backend(model, compute_dtype=HALF).state()
    assert state["bias"].dtype == torch.float32
    for name, value in model.named_parameters():
        assert torch.equal(state[name], value.detach().bfloat16()), name
    assert all(value.dtype == torch.float32 for value in make_backend(model).state().values())


def test_the_trainer_is_near_a_generator_of_rounded_weights(small_llama: Any, make_backend: Make) -> None:
    """Log-probabilities differ by roundings alone; the mean ratio is that of an unchanged policy."""
    model = copy.deepcopy(small_llama).float()
    backend = make_backend(copy.deepcopy(model), compute_dtype=HALF)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    generator = TorchGenerator(model, eos_id=1, pad_id=0, decode_samples=32, alone=False, blocking=in_place)
    found: list[Completion] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            await generator.update_weights(1, backend.state())
            found.extend(await generator.generate(GroupRequest((5, 7), tuple(range(24)), 6, 1.0)))
            tasks.cancel_scope.cancel()

    run_virtual(main)
    sampled = [torch.tensor(completion.logprobs) for completion in found]
    tokens = [torch.tensor([5, 7, *completion.token_ids]) for completion in found]
    rows = Rows(tokens, sampled, [2] * 24, [1.0] * 24, [0] * 24, filler=False)
    torch.testing.assert_close(torch.cat(backend.logprobs(rows)), torch.cat(sampled), rtol=0, atol=ROUNDING)
    sums = backend.accumulate(rows, 1).read()
    assert sums.ratio / sums.tokens == pytest.approx(1.0, abs=ROUNDING / 4)
