"""The tensors by which a whole replica in PyTorch continues, by name.

`weights/NAME` and buffers, `optimizer/KEY/NAME` for whatever the optimizer keeps of a weight (AdamW: `step`, `exp_avg`
and `exp_avg_sq`), and `reference/NAME`. NAME is the model's own; of tied weights there is one.
"""

from typing import Any

import torch

from asyncrl.trainers.backends.base import TrainingState

OPTIMIZER = "optimizer/"


def replica_state(model: Any, optimizer: torch.optim.Optimizer, reference: Any | None) -> TrainingState:
    """Return the live tensors. Weights without gradient are frozen: they are those of the loaded model."""
    parameters = dict(model.named_parameters())
    frozen = {name: value for name, value in parameters.items() if not value.requires_grad}
    tensors = {f"weights/{name}": value for name, value in _own(model).items() if name not in frozen}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}{key}/{name}"] = value
    constant = {}
    if reference is not None:
        for name, value in _own(reference).items():
            if isinstance(value, torch.nn.Parameter):
                if name not in frozen:  # What is frozen in the policy is the same in the reference.
                    constant[f"reference/{name}"] = value
            else:
                tensors[f"reference/{name}"] = value
    return TrainingState(tensors, constant, frozen)


def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make a new optimizer keep what it keeps after its first update, by one at learning rate 0 without gradient.

    So the optimizer itself says what types and devices its state has, as in torch.distributed.checkpoint.
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _own(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, of tied ones the first, and the buffers that a state dict has."""
    parameters = dict(model.named_parameters())
    state = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in state.items() if not isinstance(value, torch.nn.Parameter)}
    return {**parameters, **buffers}
