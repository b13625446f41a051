"""The weights that an optimizer updates: the model's own, or masters of what the model computes with.

Invariant: between two updates the model's weights are the masters, rounded to the type that the model computes in.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class TrainedWeights:
    """Masters and sums of gradients have the type that the model's weights had, which is float32 in a run.

    With `low` the model's weights are rounded to that type, and each micro-batch's gradients, which have it too, are
    added to sums of the masters' type. With `offload` masters are in the host's memory, and so is what an optimizer
    keeps of them. Else masters are the model's weights themselves; of sharded ones, this rank's part.
    """

    def __init__(self, model: Any, *, low: torch.dtype | None = None, offload: bool = False) -> None:
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums: dict[str, torch.Tensor] = {}
        self._apart = low is not None or offload
        self._masters = {name: _master(p, apart=self._apart, offload=offload) for name, p in self._weights.items()}
        if low is not None:
            round_weights(model, low)
            for name, parameter in self._weights.items():
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates, by the model's names; of tied weights there is one."""
        return self._masters

    def gradients(self) -> torch.Tensor:
        """Return the sums of gradients as one flat tensor, on the model's device, and forget them."""
        parts = [self._gradient(name, p).reshape(-1) for name, p in self._weights.items()]
        flat = torch.cat(parts)
        self._sums.clear()
        for parameter in self._weights.values():
            parameter.grad = None
        return flat

    @torch.no_grad()
    def updated(self) -> None:
        """Bring masters that were changed to the model."""
        if self._apart:
            for name, parameter in self._weights.items():
                local_part(parameter).copy_(self._masters[name], non_blocking=True)

    def _gradient(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        if name in self._sums:
            return self._sums[name]
        if parameter.grad is not None:
            return local_part(parameter.grad)
        return torch.zeros(self._masters[name].shape, dtype=self._masters[name].dtype, device=parameter.device)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        """Add what a backward pass gave to the sum: in the model's type small parts of a step would be lost."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient.to(self._masters[name].dtype)


def round_weights(model: Any, low: torch.dtype) -> None:
    """Bring a model's weights to a type, one after the other."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(low)


def _master(parameter: nn.Parameter, *, apart: bool, offload: bool) -> nn.Parameter:
    if not apart and not isinstance(parameter, DTensor):
        return parameter
    value = local_part(parameter.detach())
    if offload:
        value = value.to("cpu", copy=True)
    return nn.Parameter(value)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
