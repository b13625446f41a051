"""What decays, and layers that are computed again instead of kept."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends import torch_backend
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend

Make = Callable[..., TorchBackend]


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_norms_and_biases_decay_only_if_asked_to(causal_mean: Any, make_backend: Make, decay_vectors: bool) -> None:
    """Without a gradient AdamW multiplies what decays by 1 - 0.5 * 0.1, and leaves the rest."""
    before = {name: value.clone() for name, value in causal_mean.state_dict().items()}
    backend = make_backend(causal_mean, weight_decay=0.1, decay_vectors=decay_vectors)
    backend.apply(torch.zeros_like(backend.gradients()), learning_rate=0.5)
    for name, value in causal_mean.state_dict().items():
        kept = 0.95 if decay_vectors or "bias" not in name else 1.0
        torch.testing.assert_close(value, before[name] * kept, rtol=0, atol=1e-15)
    before = {name: value.clone() for name, value in causal_mean.state_dict().items()}
    backend.apply(torch.ones_like(backend.gradients()), learning_rate=0.5)
    assert all(bool((value < before[name]).all()) for name, value in causal_mean.state_dict().items())


@pytest.mark.parametrize("packed", [False, True])
def test_layers_computed_again_keep_less_and_give_the_same_gradient(
    small_llama: Any, varied: Any, make_backend: Make, packed: bool
) -> None:
    """Bytes that autograd keeps between the passes: fewer than half. Models stay in evaluation mode."""
    rows = Rows(
        [torch.tensor(sample.ids) for sample in varied],
        [torch.full((len(sample.ids) - sample.prompt,), -2.0) for sample in varied],
        [sample.prompt for sample in varied],
        [sample.advantage for sample in varied],
        [0] * len(varied),
        filler=False,
    )
    kept, gradients = [], []
    for recompute in (False, True):
        backend = make_backend(copy.deepcopy(small_llama), packed=packed, recompute=recompute)
        sizes: dict[int, int] = {}

        def count(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            backend.accumulate(rows, 10)
        kept.append(sum(sizes.values()))
        gradients.append(backend.gradients())
    assert float(gradients[0].abs().max()) > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
    assert kept[1] < kept[0] / 2
    assert not any(module.training for module in small_llama.modules())


def test_a_model_without_such_layers_is_refused(causal_mean: Any, make_backend: Make) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing is true, and no layer of CausalMean"):
        make_backend(causal_mean, recompute=True)


def even_rows(lengths: Sequence[int]) -> Rows:
    draw = torch.Generator().manual_seed(1)
    return Rows(
        [torch.randint(1, 9, (length,), generator=draw) for length in lengths],
        [torch.full((length - 1000,), -2.0) for length in lengths],
        [1000] * len(lengths),
        [(-1.0) ** i for i in range(len(lengths))],
        [0] * len(lengths),
        filler=False,
    )


def test_packed_samples_that_are_long_and_alike_stay_rows_where_a_kernel_packs(
    small_llama: Any, make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for rows is faster. With a common length for all ranks, and with other inputs, they are packed."""
    right = make_backend(copy.deepcopy(small_llama))
    monkeypatch.setattr(torch_backend, "has_varlen", lambda device, dtype: True)
    backend = make_backend(copy.deepcopy(small_llama), packed=True)
    rows = even_rows((1030, 1024))
    sums = [one.accumulate(rows, 50).read() for one in (right, backend)]
    assert sums[1].loss == pytest.approx(sums[0].loss, abs=1e-12)
    expected, gradient = right.gradients(), backend.gradients()
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert backend._layout(rows.tokens).packing is None
    assert backend._layout(even_rows((1100, 1024)).tokens).packing is not None
    assert backend._layout(rows.tokens, 3000).packing is not None
    assert backend._layout(rows.tokens, 0, {"pixels": [torch.ones(1)] * 2}).packing is not None
    assert backend._layout(rows.tokens, 0, {"routed_experts": [torch.ones(1)] * 2}).packing is None
