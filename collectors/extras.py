"""Extras: tensors that a task attaches to its samples, as columns of their group."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.collectors.tasks.base import Reward

if TYPE_CHECKING:
    import torch

Kind = tuple[str, tuple[int, ...]]
"""A tensor's dtype, and its shape without the first dimension; all samples of a run have the same, per extra."""


def check_extras(reward: Reward, declared: Sequence[str]) -> None:
    """ValueError or TypeError if a reward does not bring exactly the extras of its task, as tensors."""
    if set(reward.extras) != set(declared):
        raise ValueError(
            f"a reward brings the extras {sorted(map(str, reward.extras))}; its task declares {sorted(declared)}: "
            "name them all in the task's `extras`, and bring each with every reward"
        )
    if not reward.extras:
        return
    # Only here: without extras, the process that scores starts without torch, seconds sooner.
    import torch

    from asyncrl.engine.data_plane.codec import carries

    for name, value in reward.extras.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"extra {name!r} is {type(value).__name__}; it must be a tensor")
        if not value.ndim:
            raise ValueError(f"extra {name!r} is a tensor without dimensions; it must be of shape (n, …)")
        if value.layout != torch.strided or not carries(value.dtype):
            raise TypeError(
                f"extra {name!r} is of {value.dtype} and {value.layout}; the data plane carries no such tensor"
            )


def kind_of(tensor: "torch.Tensor") -> Kind:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])


def shown(kind: Kind) -> str:
    dtype, shape = kind
    return f"{dtype} of shape ({', '.join(['n', *map(str, shape)])})"


def common_kinds(rewards: Sequence[Reward]) -> dict[str, Kind]:
    """Return, by extra, the kind that most rewards have, and of equally frequent ones the first."""
    if not rewards:
        return {}
    return {
        name: Counter(kind_of(reward.extras[name]) for reward in rewards).most_common(1)[0][0]
        for name in rewards[0].extras
    }


def odd_extra(reward: Reward, kinds: Mapping[str, Kind]) -> str | None:
    """Return which extra has another kind than its siblings; neither a row nor a batch could hold it."""
    for name, value in reward.extras.items():
        found = kind_of(value)
        if found != kinds[name]:
            return f"extra {name!r} is {shown(found)}; its siblings' are {shown(kinds[name])}"
    return None


def extra_columns(outcomes: Sequence[object]) -> dict[str, list["torch.Tensor"]]:
    """Return one tensor per sample by name; for a sample whose score failed, an empty one of its siblings' kind."""
    columns: dict[str, list[torch.Tensor]] = {}
    rewards = [outcome for outcome in outcomes if isinstance(outcome, Reward)]
    for name in rewards[0].extras if rewards else ():
        like = rewards[0].extras[name]
        empty = like.new_empty((0, *like.shape[1:]))
        columns[name] = [o.extras[name] if isinstance(o, Reward) else empty for o in outcomes]
    return columns
