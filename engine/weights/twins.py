"""Weights that a model has under several names, such as an output head tied to the embedding: each is sent once."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from asyncrl.engine.weights.base import State

Value = TypeVar("Value")


def without_twins(state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the state with one name per tensor, the first, and for each name left out the one that stands for it.

    Example: of an embedding and a head that is tied to it, the embedding and `{"lm_head.weight": "embed.weight"}`.
    """
    kept: dict[str, torch.Tensor] = {}
    twins: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        # Tensors without numbers may all lie at address 0.
        place = (
            (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        )
        twin = first.setdefault(place, name)
        if twin == name:
            kept[name] = tensor
        else:
            twins[name] = twin
    return kept, twins


def with_twins(kept: Mapping[str, Value], twins: Mapping[str, str]) -> dict[str, Value]:
    """Return `kept` with the names that were left out; a tensor is then there under several names, in one memory."""
    return {**kept, **{name: kept[twin] for name, twin in twins.items()}}
