"""The tensors by which a model in PyTorch continues, by name.

`weights/NAME` and buffers, `optimizer/KEY/NAME` for whatever the optimizer keeps of a weight (AdamW: `step`, `exp_avg`
and `exp_avg_sq`), and `reference/NAME`. NAME is the model's own; of tied weights there is one. Weights are the masters,
so a state does not depend on the type that the model computes in. Of sharded weights it has a rank's parts.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncrl.trainers.backends.base import Place, TrainingState
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.backends.trained_weights import TrainedWeights, local_part

OPTIMIZER = "optimizer/"


def replica_state(
    model: Any,
    weights: TrainedWeights,
    optimizer: torch.optim.Optimizer,
    reference: Any | None,
    *,
    device: torch.device,
    shards: Shards | None = None,
) -> TrainingState:
    """Return the live tensors. Weights without gradient are frozen: they are those of the loaded model."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    places = _places(model, shards)
    own = {**_own(model), **weights.masters}
    tensors = {f"weights/{name}": value for name, value in own.items() if name not in frozen}
    located = {f"weights/{name}": place for name, place in places.items()}
    for name, master in weights.masters.items():
        for key, value in optimizer.state.get(master, {}).items():
            tensors[f"{OPTIMIZER}{key}/{name}"] = value
            if name in places and value.ndim:  # A count of steps is whole.
                located[f"{OPTIMIZER}{key}/{name}"] = places[name]
    constant = {}
    if reference is not None:
        for name, value in _own(reference).items():
            if isinstance(value, torch.nn.Parameter):
                if name not in frozen:  # What is frozen in the policy is the same in the reference.
                    constant[f"reference/{name}"] = local_part(value.detach())
                    if name in places:
                        located[f"reference/{name}"] = places[name]
            else:
                tensors[f"reference/{name}"] = value
    return TrainingState(tensors, constant, frozen, device, located)


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make a new optimizer keep what it keeps after its first update, all zeros, as it begins with.

    By an update at learning rate 0 without gradient, so the optimizer itself says what types and devices its state has,
    as in torch.distributed.checkpoint. A run so finds out at the start whether there is memory for the moments.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def _own(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, of tied ones the first, and the buffers that a state dict has."""
    parameters = dict(model.named_parameters())
    state = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in state.items() if not isinstance(value, torch.nn.Parameter)}
    return {**parameters, **buffers}


def _places(model: Any, shards: Shards | None) -> dict[str, Place]:
    if shards is None:
        return {}
    return {name: shards.place(value) for name, value in model.named_parameters() if isinstance(value, DTensor)}
