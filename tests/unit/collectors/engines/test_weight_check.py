"""Whether a model computes with a file's weights: packed copies are found out, by one column and one bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asyncrl.collectors.engines.weight_check import OpenFiles, differing_modules


class Packed(nn.Module):
    """Computes with a copy of its weight, as vLLM's layers do on a CPU; `apply` is what its kernel does."""

    def __init__(self, weight: torch.Tensor, *, keep: bool = False) -> None:
        super().__init__()
        self.packed = weight.clone()
        self.weight = nn.Parameter(weight.clone() if keep else torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.packed.t())


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"embed_tokens": (10, 6), "q_proj": (4, 6), "k_proj": (2, 6), "norm": (6,)}
    return {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def model(state: dict[str, torch.Tensor]) -> Any:
    """Return a tied model that has joined two projections, and padded its vocabulary."""
    made: Any = nn.Module()
    made.packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
    embedding = torch.cat([state["embed_tokens.weight"], torch.zeros(2, 6, dtype=state["norm.weight"].dtype)])
    made.embed_tokens = Norm(embedding)
    made.qk_proj = Packed(torch.cat([state["q_proj.weight"], state["k_proj.weight"]]))
    made.norm = Norm(state["norm.weight"])
    made.lm_head = Packed(embedding, keep=True)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_the_files_weights_differs_in_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    state = weights(dtype)
    save_file(state, tmp_path / "model.safetensors")
    with OpenFiles(tmp_path) as files:
        assert differing_modules(model(state), files) == (4, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lm_head", "qk_proj"])
def test_a_packed_copy_of_old_weights_is_found_out_by_one_unit_in_the_last_place(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = weights(dtype)
    save_file(state, tmp_path / "model.safetensors")
    made = model(state)
    packed = getattr(made, name).packed
    packed[0, 0] = torch.nextafter(packed[0, 0], torch.tensor(9.0, dtype=dtype))
    with OpenFiles(tmp_path / "model.safetensors") as files:
        assert differing_modules(made, files)[1] == [name]


def test_what_a_module_holds_is_compared_too(tmp_path: Path) -> None:
    state = weights(torch.float32)
    save_file({**state, "norm.weight": state["norm.weight"] + 1}, tmp_path / "model.safetensors")
    with OpenFiles(tmp_path) as files:
        assert differing_modules(model(state), files)[1] == ["norm"]


def test_a_model_whose_output_layer_is_not_found_counts_as_differing(tmp_path: Path) -> None:
    state = weights(torch.float32)
    save_file(state, tmp_path / "model.safetensors")
    made = model(state)
    del made.lm_head
    with OpenFiles(tmp_path) as files:
        assert differing_modules(made, files)[1] == ["the output layer, which was not found"]
