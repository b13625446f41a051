"""A model whose weights are sharded over ranks by FSDP2: a layer is whole only while it runs.

    layers ──all-gather──▶ pass of a layer ──▶ freed      the last micro-batch: gradients ──reduce-scatter──▶ parts

Invariant: nothing changes a part while its layer is whole: the last pass before an update frees all layers. All ranks
run the same passes in the same order, because each layer of a pass waits for all of them.
Source: PyTorch FSDP (Zhao et al., arXiv 2304.11277); groups of ranks with a replica each are its hybrid sharding. To
free a layer after each pass is stage 3 of ZeRO (Rajbhandari et al., arXiv 1910.02054), to keep it whole until the
update is stage 2.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.routers import has_routers
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.digest import check_equal, digest
from asyncrl.engine.weights.twins import without_twins
from asyncrl.trainers.backends.base import Place
from asyncrl.trainers.backends.chosen import Scores
from asyncrl.trainers.backends.next_tokens import NextTokens

_ROOM_FOR_WHOLE = 0.1
"""The most of a GPU's memory that whole weights take to stay there of themselves."""


class Shards:
    """Which ranks of the joined process group hold a replica together: each `ranks` in a row, on their `device`.

    Calls of a backend with shards need it to be the current one, whose streams FSDP2 takes.
    """

    def __init__(self, device: torch.device, *, ranks: int) -> None:
        world = dist.get_world_size()
        self.device = device
        if device.type == "cuda":
            # NCCL's groups begin on the current one.
            torch.cuda.set_device(device)
        whole = ranks == world
        self._mesh = init_device_mesh(
            device.type,
            (world,) if whole else (world // ranks, ranks),
            mesh_dim_names=("shard",) if whole else ("replica", "shard"),
        )
        self._ranks, self._index = ranks, self._mesh.get_local_rank("shard")
        self._first_replica = whole or self._mesh.get_local_rank("replica") == 0
        self._group = self._mesh.get_group("shard")

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which publishes."""
        return dist.get_rank() == 0

    def total(self, value: float) -> float:
        """Return the sum over the ranks of this replica."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, group=self._group)
        return float(values)

    def place(self, weight: DTensor) -> Place:
        """Return where this rank's part of a weight lies.

        FSDP2 cuts the first dimension into parts of the same size, rounded up: of 5 rows on 4 ranks they are 2, 2, 1
        and 0.
        """
        rows = weight.shape[0]
        begin = min(rows, -(-rows // self._ranks) * self._index)
        return Place(tuple(weight.shape), (begin, *(0,) * (weight.ndim - 1)), self._first_replica)

    def split(
        self, model: Any, scorer: NextTokens, *, low: torch.dtype | None = None, reshard: bool | None = True
    ) -> "ShardedTokens":
        """Shard a whole model that is in the host's memory; VersionError if ranks loaded different weights.

        With `low` weights are rounded to that type where they become whole, and sums of gradients are in float32.
        With `reshard` a layer is whole only while it runs, else until the last backward pass before an update; None: it
        stays whole if every rank has a GPU of which that takes a tenth or less.
        """
        # Afterwards nobody can tell: each rank would have parts of another model. All of them have to choose alike.
        mine = digest(without_twins(model.state_dict())[0]), self._has_room(model, low)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        check_equal({f"rank{rank}": digests for rank, (digests, _) in enumerate(found)})
        if reshard is None:
            reshard = not all(has_room for _, has_room in found)
        policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False) if low else MixedPrecisionPolicy()
        return ShardedTokens(model, scorer, mesh=self._mesh, policy=policy, reshard=reshard)

    def _has_room(self, model: Any, low: torch.dtype | None) -> bool:
        if self.device.type != "cuda":
            return False
        size = sum(p.numel() * (p.element_size() if low is None else low.itemsize) for p in model.parameters())
        return bool(size <= _ROOM_FOR_WHOLE * torch.cuda.get_device_properties(self.device).total_memory)


class _Pass(nn.Module):
    """A model and its scores as one module: what runs outside of it would find weights that are not whole."""

    def __init__(self, model: Any, scorer: NextTokens) -> None:
        super().__init__()
        self.model = model
        self._scorer = scorer

    def forward(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scorer.scores(*given)
        # FSDP2 looks for tensors in tuples, not in records: the backward pass begins with them.
        return scores.logprobs, scores.entropies


class ShardedTokens:
    """Scores next tokens as NextTokens does. Each decoder layer is sharded by itself; the rest is whole together."""

    def __init__(
        self, model: Any, scorer: NextTokens, *, mesh: Any, policy: MixedPrecisionPolicy, reshard: bool
    ) -> None:
        names, self._twins = without_twins(model.state_dict())
        self._model = model
        self._reshards = reshard
        layers = layers_of(model)
        for layer in layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        self._root = cast("Any", fully_shard(_Pass(model, scorer), mesh=mesh, mp_policy=policy))
        for module in model.modules():
            # torch.compile takes integers of what FSDP manages, such as the size of a head, as unknown. Kernels that
            # rotate queries and keys then took a twelfth of a step on an H200, and no visible part with known sizes.
            module._is_fsdp_managed_module = False
        for module in self._modules():
            # The loss is divided by the tokens of all ranks, so gradients are sums. NCCL's other ways to add them up
            # are not gloo's.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A rank whose rows reach fewer weights, such as experts, would otherwise leave the others waiting.
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)
            elif has_routers(model):
                raise ConfigError(
                    f"trainer.sharding of a mixture of experts needs a torch after {torch.__version__}, whose FSDP2 "
                    "waits for experts that no token chose. It must be none, or the backend megatron"
                )
        self._buckets: list[tuple[FSDPModule, list[str]]] = []
        rest = dict.fromkeys(names)
        for name, layer in layers.items():
            own = [one for one in rest if one.startswith(f"{name}.")]
            self._buckets.append((cast("FSDPModule", layer), own))
            for one in own:
                del rest[one]
        self._buckets.insert(0, (self._root, list(rest)))

    @property
    def twins(self) -> Mapping[str, str]:
        """Further names of tied weights, each with the one that stands for it."""
        return self._twins

    def scores(
        self, ids: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor, arguments: Mapping[str, Any]
    ) -> Scores:
        """Return scores as NextTokens does; every rank has to call."""
        scores = Scores(*self._root(ids, index, tokens, arguments))
        if self._reshards and not torch.is_grad_enabled():
            # What is not in a layer stays whole for a backward pass, and there is none.
            self._root.reshard()
        return scores

    def sum_gradients(self, *, last: bool) -> None:
        """Say whether the next backward pass sums gradients over ranks: only the last one before an update."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last or self._reshards)

    def reshard(self) -> None:
        """Make the model's weights parts again, where layers are whole."""
        for module in self._modules():
            module.reshard()

    @torch.no_grad()
    def buckets(self, dtype: torch.dtype) -> Iterator[State]:
        """Yield the weights in `dtype`, each layer's together, and the buffers; every rank has to go through all."""
        for module, names in self._buckets:
            module.unshard()
            # Not by the state dict, which would make them parts again.
            yield {name: _weight(self._model, name, dtype) for name in names}
            module.reshard()

    def _modules(self) -> list[FSDPModule]:
        return [module for module in self._root.modules() if isinstance(module, FSDPModule)]


def layers_of(model: Any) -> dict[str, nn.Module]:
    """Return a transformers model's layers by name; ConfigError if none is marked as transformers marks them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    if not layers:
        raise ConfigError(
            f"trainer.sharding is on, and no layer of {type(model).__name__} can be sharded by itself; it must be none"
        )
    return layers


def _weight(model: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    owner, _, own_name = name.rpartition(".")
    value: torch.Tensor = getattr(model.get_submodule(owner), own_name).detach()
    return value.to(dtype) if own_name in model.get_submodule(owner)._parameters else value
