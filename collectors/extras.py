"""Extras: tensors that a task attaches to its samples, as columns of their group."""

from collections.abc import Sequence

import torch

from asyncrl.collectors.tasks import Reward


def check_extras(reward: Reward, declared: Sequence[str]) -> None:
    """Refuse a reward that does not bring exactly the extras its task declares, as tensors: ValueError or TypeError."""
    if set(reward.extras) != set(declared):
        raise ValueError(
            f"a reward brings the extras {sorted(reward.extras)}; its task declares {sorted(declared)}: "
            "name them all in the task's `extras`, and bring each with every reward"
        )
    for name, value in reward.extras.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"extra {name!r} is {type(value).__name__}; it must be a tensor")
        if not value.ndim:
            raise ValueError(f"extra {name!r} is a tensor without dimensions; it must be of shape (n, …)")


def extra_columns(outcomes: Sequence[Reward | Exception], declared: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    """Return one tensor a sample by name; an empty one, of its siblings' kind, for a sample that failed to score."""
    columns: dict[str, list[torch.Tensor]] = {}
    for name in declared:
        like = next(outcome.extras[name] for outcome in outcomes if isinstance(outcome, Reward))
        empty = like.new_empty((0, *like.shape[1:]))
        columns[name] = [o.extras[name] if isinstance(o, Reward) else empty for o in outcomes]
    return columns
