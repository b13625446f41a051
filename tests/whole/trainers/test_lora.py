"""Training an adapter: its gradients, what the optimizer keeps, the ratio, and the reference without it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from asyncrl.configs.sections.lora import Lora
from asyncrl.engine.model.lora import add_adapter
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.rank_state.keeper import StateKeeper
from asyncrl.trainers.rank_state.saved import SavedState

Make = Callable[..., TorchBackend]
LORA = Lora(rank=3, alpha=5.0, target_modules=["q_proj", "down_proj", "lm_head"])
IDS = [torch.tensor([2, 5, 7, 3, 1]), torch.tensor([4, 9, 6])]


def adapted_model(small_llama: Any) -> Any:
    """A copy of the model with an adapter, none of whose matrices is zero."""
    model = add_adapter(copy.deepcopy(small_llama), LORA, seed=0)
    random = torch.Generator().manual_seed(1)
    for parameter in trained_of(model).values():
        parameter.data = torch.rand(parameter.shape, generator=random, dtype=torch.float64) - 0.5
    return model


def trained_of(model: Any) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def dense_logprobs(plain: Any, adapter: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a row under W + 5/3 B A, by autograd of the plain model alone."""
    weights = dict(plain.state_dict())
    for name, value in adapter.items():
        if ".lora_A." in name:
            layer = name.partition(".lora_A.")[0]
            product = adapter[name.replace("lora_A", "lora_B")] @ value
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 5 / 3 * product
    out = functional_call(plain, weights, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]
    return torch.log_softmax(out[:-1], -1).gather(-1, ids[1:, None])[:, 0]


def rows_of(logprobs: list[torch.Tensor]) -> Rows:
    return Rows(IDS, logprobs, [2, 1], [1.0, -0.5], [0, 0], filler=False)


def test_gradients_are_those_of_the_dense_formula(small_llama: Any, make_backend: Make) -> None:
    model = adapted_model(small_llama)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in trained_of(model).items()}
    rows = rows_of([torch.full((3,), -2.5), torch.full((2,), -2.5)])
    found = make_backend(model, clip=Clip(0.99, 1e3, 1e3))
    found.accumulate(rows, 5)
    loss = torch.zeros((), dtype=torch.float64)
    for ids, sampled, prompt, advantage in zip(IDS, rows.logprobs, rows.prompt_tokens, rows.advantages, strict=True):
        ratio = (dense_logprobs(small_llama, leaves, ids)[prompt - 1 :] - sampled.double()).exp()
        loss = loss - (ratio * advantage).sum() / 5
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([leaf.grad.reshape(-1) for leaf in leaves.values() if leaf.grad is not None])
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found.gradients(), expected, rtol=0, atol=1e-10)


def test_only_the_adapter_is_reduced_optimized_and_changed(small_llama: Any, make_backend: Make) -> None:
    model = adapted_model(small_llama)
    backend = make_backend(model, weight_decay=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count = sum(value.numel() for value in trained_of(model).values())
    backend.accumulate_supervised([IDS[0]], [2], 3)
    gradients = backend.gradients()
    assert gradients.shape == (count,)
    backend.apply(gradients, learning_rate=0.1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(trained_of(model))
    assert not any(
        torch.equal(backend.state()[f"{name}.weight"], value)
        for name, value in (
            (name.removesuffix(".base_layer.weight"), value)
            for name, value in before.items()
            if name.endswith(".base_layer.weight")
        )
    )
    moments = [tensor for held in backend._optimizer.state.values() for tensor in held.values() if tensor.ndim]
    assert sum(tensor.numel() for tensor in moments) == 2 * count


def test_the_ratio_to_a_generator_with_the_merged_weights_is_1(small_llama: Any, make_backend: Make) -> None:
    """In float32, as a run computes: what samples is W + BA in one matrix, what trains is not."""
    backend = make_backend(adapted_model(small_llama).float())
    generator = copy.deepcopy(small_llama).float()
    generator.load_state_dict(backend.state())
    rows = rows_of([])
    sampled = make_backend(generator).logprobs(rows)
    sums = backend.accumulate(replace(rows, logprobs=sampled), 5).read()
    assert sums.ratio / sums.tokens == pytest.approx(1.0, abs=1e-5)
    assert (sums.tokens, sums.clipped) == (5, 0)


def test_the_reference_is_the_model_without_its_adapter_and_without_a_copy(
    small_llama: Any, make_backend: Make
) -> None:
    model = adapted_model(small_llama)
    backend = make_backend(model, reference_kl=0.1)
    rows = rows_of([])
    before = backend.logprobs(rows)
    plain = make_backend(small_llama).logprobs(rows)
    reference = backend.logprobs(rows, reference=True)
    assert all(torch.equal(mine, other) for mine, other in zip(reference, plain, strict=True))
    assert not any(torch.equal(mine, other) for mine, other in zip(before, plain, strict=True))
    assert backend._reference is None
    backend.accumulate(replace(rows, logprobs=before, reference_logprobs=reference), 5)
    assert float(backend.gradients().abs().max()) > 0
    assert all(torch.equal(mine, other) for mine, other in zip(backend.logprobs(rows), before, strict=True))


def test_a_saved_state_of_an_adapter_continues_bit_for_bit(
    small_llama: Any, make_backend: Make, tmp_path: Path
) -> None:
    """The base is not written: it is loaded anew, and only its checksums are compared."""

    def step(backend: TorchBackend) -> None:
        backend.accumulate_supervised([IDS[0]], [2], 3)
        backend.apply(backend.gradients(), learning_rate=0.1)

    first = make_backend(adapted_model(small_llama))
    step(first)
    keeper = StateKeeper(0, 1)
    keeper.hold(first, 1)
    keeper.save(tmp_path)
    assert not any("base_layer" in name or "embed" in name for name in SavedState(tmp_path).names)
    second = make_backend(add_adapter(copy.deepcopy(small_llama), LORA, seed=9))
    assert StateKeeper(0, 1).load(tmp_path, second) == 1
    for backend in (first, second):
        step(backend)
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())
