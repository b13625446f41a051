"""Weights in bfloat16 with float32 masters, and masters in the host's memory, beside an update written by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.configs import load_config
from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.rank_state.keeper import StateKeeper

Make = Callable[..., TorchBackend]
HALF = torch.bfloat16
LOW = {"low_weights": True, "compute_dtype": HALF}


def rows_of(samples: Any) -> Rows:
    return Rows(
        [torch.tensor(sample.ids) for sample in samples],
        [torch.zeros(len(sample.ids) - sample.prompt) for sample in samples],
        [sample.prompt for sample in samples],
        [sample.advantage for sample in samples],
        [0] * len(samples),
        filler=False,
    )


def low_gradients(model: Any, sample: Any, total: int) -> dict[str, torch.Tensor]:
    """Gradients of one sample's supervised loss by a loop over its tokens, in the type of the model's weights."""
    ids = torch.tensor([sample.ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    table = torch.log_softmax(logits, -1)
    chosen = [table[t - 1, sample.ids[t]] for t in range(sample.prompt, len(sample.ids))]
    loss = -torch.stack(chosen).sum() / total
    names, values = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def test_a_step_is_a_float32_adamw_update_of_masters_by_bfloat16_gradients(
    small_llama: Any, varied: Any, make_backend: Make
) -> None:
    """Three steps of two micro-batches, beside masters, sums and moments in float64 that are written out here."""
    start = copy.deepcopy(small_llama).float()
    backend = make_backend(copy.deepcopy(start), weight_decay=0.1, **LOW)
    masters = {name: value.detach().double() for name, value in start.named_parameters()}
    first, second = ({name: torch.zeros_like(value) for name, value in masters.items()} for _ in range(2))
    model, rate = copy.deepcopy(start), 1e-3
    for step in (1, 2, 3):
        for parameter, master in zip(model.parameters(), masters.values(), strict=True):
            parameter.data = master.to(HALF)
        parts = [low_gradients(model, sample, 9) for sample in varied[:2]]
        assert {part.dtype for part in parts[0].values()} == {HALF}
        sums = {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in masters}
        norm = torch.stack([value.norm() for value in sums.values()]).norm()
        for name, master in masters.items():
            gradient = sums[name] * min(1.0, 1.0 / float(norm))
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            mean, scale = first[name] / (1 - 0.9**step), (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            master.mul_(1 - rate * 0.1).sub_(rate * mean / scale)
        for sample in varied[:2]:
            backend.accumulate_supervised([torch.tensor(sample.ids)], [sample.prompt], 9)
        found = backend.apply(backend.gradients(), learning_rate=rate)
        # One pass differs from the other by the order of sums in bfloat16.
        assert found == pytest.approx(float(norm), rel=0.02)
    saved = backend.training_state().tensors
    for name, master in masters.items():
        held = saved[f"weights/{name}"]
        assert held.dtype == saved[f"optimizer/exp_avg/{name}"].dtype == torch.float32
        # An element whose gradient is near zero may move the other way; the rest is where it should be.
        moved = master - dict(start.named_parameters())[name].double()
        assert float((held.detach().double() - master).norm() / moved.detach().norm()) < 0.1, name
        assert torch.equal(backend.state()[name], held.to(HALF)), name


def test_gradients_of_micro_batches_add_up_in_float32(small_llama: Any, varied: Any, make_backend: Make) -> None:
    """256 equal micro-batches: in bfloat16 a sum stops growing once a part is less than half of its last digit."""
    backend = make_backend(copy.deepcopy(small_llama).float(), **LOW)
    rows = rows_of(varied[:1])
    backend.accumulate(rows, 10)
    one = backend.gradients()
    for _ in range(256):
        backend.accumulate(rows, 10)
    found = backend.gradients()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, one * 256, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [LOW, {"offload": True}, {**LOW, "offload": True}], ids=["low", "offload", "both"])
def test_a_saved_state_continues_bit_for_bit_and_is_that_of_plain_weights(
    small_llama: Any, varied: Any, make_backend: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    def steps(backend: TorchBackend, count: int) -> None:
        for _ in range(count):
            backend.accumulate(rows_of(varied), 10)
            backend.apply(backend.gradients(), learning_rate=1e-2)

    start = copy.deepcopy(small_llama).float()
    backend = make_backend(copy.deepcopy(start), **options)
    steps(backend, 1)
    keeper = StateKeeper(0, 1)
    keeper.hold(backend, 1)
    keeper.save(tmp_path)
    steps(backend, 2)
    other = make_backend(copy.deepcopy(start), **options)
    StateKeeper(0, 1).load(tmp_path, other)
    steps(other, 2)
    found = other.training_state().tensors
    assert all(torch.equal(value, found[name]) for name, value in backend.training_state().tensors.items())
    assert all(torch.equal(value, other.state()[name]) for name, value in backend.state().items())
    # A state that low weights left is read with plain ones, and the other way round.
    plain = make_backend(copy.deepcopy(start), compute_dtype=HALF)
    StateKeeper(0, 1).load(tmp_path, plain)
    assert {value.dtype for value in plain.training_state().tensors.values()} == {torch.float32}


def test_masters_in_host_memory_train_the_same(small_llama: Any, varied: Any, make_backend: Make) -> None:
    found = []
    for offload in (False, True):
        backend = make_backend(copy.deepcopy(small_llama).float(), offload=offload)
        for _ in range(2):
            backend.accumulate(rows_of(varied), 10)
            backend.apply(backend.gradients(), learning_rate=1e-2)
        found.append(backend.state())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_low_weights_need_a_model_in_bfloat16() -> None:
    with pytest.raises(ConfigError, match=r"is bf16_weights and model\.dtype float32; dtype must be bfloat16"):
        load_config("default", {"trainer": {"precision": "bf16_weights"}})
