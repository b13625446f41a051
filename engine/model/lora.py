"""A low-rank adapter on a model (LoRA): which layers get one, and the weights that come of it.

The model stays of its own class, with the names of its checkpoint: `peft` puts its layers into it. Invariant: no weight
of the model itself ever changes; only the adapter's matrices have gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from asyncrl.configs.sections.lora import Lora
from asyncrl.engine.errors import ConfigError

NAME = "default"
"""What peft calls the one adapter of a model."""
_BASE = ".base_layer."
_OWN = (".lora_A.", ".lora_B.")


def check_installed() -> None:
    """ConfigError if the package that makes adapters is missing."""
    if find_spec("peft") is None:
        raise ConfigError("lora.rank is set, and the package peft is not installed here: pip install 'asyncrl[lora]'")


def choose_layers(model: Any, wanted: Sequence[str] | str) -> list[str]:
    """Return the full names of the layers that get an adapter, in the model's order.

    `wanted` is `auto`, or ends of names: `q_proj` means `model.layers.0.self_attn.q_proj` and all others of that end.
    ConfigError names an entry that no linear layer has, and a head that shares its weight with the input embedding.
    """
    linear = _linear_layers(model)
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    if wanted == "auto":
        chosen = {name for name in linear if name not in heads}
    else:
        found = {entry: [name for name in linear if _ends(name, entry)] for entry in wanted}
        lost = next((entry for entry, names in found.items() if not names), None)
        if lost is not None:
            raise ConfigError(
                f"lora.target_modules has {lost!r}, {_what_is(model, lost)}; the linear layers of this "
                f"{type(model).__name__} are {', '.join(layer_ends(linear)) or 'none'}"
            )
        chosen = {name for names in found.values() for name in names}
    tied = [name for name in heads if name in chosen]
    if tied and _is_tied(model):
        raise ConfigError(
            f"lora.target_modules takes in {tied[0]!r}, which shares its weight with the input embedding; an adapter "
            "would part them. Leave it out"
        )
    if not chosen:
        raise ConfigError(f"lora.rank is set, and {type(model).__name__} has no linear layer that could be adapted")
    return [name for name in linear if name in chosen]


def add_adapter(model: Any, lora: Lora, *, seed: int) -> Any:
    """Put an adapter into a model that is in memory, and return it; its outputs are as before.

    Equal arguments give equal adapters in every process: A is random from `seed`, B is zero. The adapter has the type
    of the layers' weights. Dropout is 0: the trainer's log-probabilities are compared with the sampler's.
    """
    check_installed()
    from peft import LoraConfig, inject_adapter_in_model

    layers = choose_layers(model, lora.target_modules)
    assert lora.rank is not None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.factor) if float(lora.factor).is_integer() else lora.factor,
        lora_dropout=0.0,
        fan_in_fan_out=not isinstance(model.get_submodule(layers[0]), nn.Linear),
        target_modules=layers,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return inject_adapter_in_model(config, model, adapter_name=NAME).eval()


def layer_ends(names: Sequence[str]) -> list[str]:
    """Return the last parts of layers' names, each once: `q_proj` of `model.layers.0.self_attn.q_proj`."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def adapter_size(model: Any, lora: Lora) -> int:
    """Return how many numbers an adapter of this model has: the rank times inputs and outputs of each layer."""
    assert lora.rank is not None
    layers = [model.get_submodule(name) for name in choose_layers(model, lora.target_modules)]
    return sum(lora.rank * sum(layer.weight.shape) for layer in layers)


def has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config")


@torch.no_grad()
def merged_state(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state dict of the model alone, under its own names, with the adapter added to its weights.

    W + alpha / rank · B A (Hu et al. 2021, section 4.1) is computed in the type of W and then cast to `dtype`. All else
    is the model's own, parameters as such. The model's tensors are not written to.
    """
    layers = _adapted_layers(model)
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layer, _, rest = name.rpartition(_BASE)
        if layer in layers and rest == "weight":
            state[f"{layer}.weight"] = (value + layers[layer].get_delta_weight(NAME)).to(dtype)
        elif not any(part in name for part in _OWN):
            state[name.replace(_BASE, ".", 1) if layer in layers else name] = value
    return state


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapter's matrices, by the names that peft has for them in its files."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": value.detach()
        for name, value in model.named_parameters()
        if any(part in name for part in _OWN)
    }


def adapted_ends(model: Any) -> list[str]:
    """Return the shortest names by which peft finds the adapted layers, and no others, in the model."""
    adapted = list(_adapted_layers(model))
    ends = layer_ends(adapted)
    others = [name for name, _ in model.named_modules() if name not in adapted and ".lora_" not in name]
    return ends if not any(_ends(name, end) for name in others for end in ends) else adapted


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Have the model compute as it was loaded."""
    layers = _adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(model: Any) -> Mapping[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _linear_layers(model: Any) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _is_tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # An outline without weights is not tied yet, and says so in its configuration.
    return head.weight is embedding.weight or bool(model.config.get_text_config().tie_word_embeddings)


def _what_is(model: Any, entry: str) -> str:
    """Say what an entry names that is not a linear layer."""
    kinds = [type(module).__name__ for name, module in model.named_modules() if _ends(name, entry)]
    return f"which is a {kinds[0]}, not a linear layer" if kinds else "by which no layer's name ends"


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
