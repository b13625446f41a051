"""A rank's weights as parts of a transformers model's: filled from whole tensors, and joined to whole ones.

Invariant: of all ranks that call together, one counts each element, so that a sum over zeros elsewhere is the tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.megatron.parts import Part, PartsOf

Value = Callable[[Any], torch.Tensor | None]


def whole_shapes(config: Any) -> dict[str, torch.Size]:
    """Return the shapes of a transformers model's weights by name; of tied ones the first."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def once(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a weight on one of the ranks of a replica that split experts: the others have equal ones of all else."""
    of_all = getattr(parameter, "allreduce", True)
    return None if of_all and parallel_state.get_expert_model_parallel_rank() else parameter.detach()


class RankWeights:
    """The weights of a Model, by the names and boxes of the transformers model."""

    def __init__(self, model: Any, config: Any, shapes: Mapping[str, torch.Size]) -> None:
        parts_of = PartsOf(config)
        self._shapes = shapes
        self._parts: dict[torch.nn.Parameter, list[Part]] = {}
        self._owned: dict[str, list[tuple[torch.nn.Parameter, Part]]] = {name: [] for name in shapes}
        for name, parameter in model.named_parameters():
            words = name.split(".")
            layer = model.decoder.layers[int(words[2])].layer_number - 1 if words[:2] == ["decoder", "layers"] else None
            self._parts[parameter] = parts_of.of(name, parameter, layer)
            for part in self._parts[parameter]:
                self._owned[part.name].append((parameter, part))

    def check_whole(self, group: dist.ProcessGroup) -> None:
        """ConfigError unless the ranks of a group, all of which call, have each element of the model once."""
        meta = {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}
        counts = [
            sum(meta[name][part.there].numel() for one, part in parts if part.counted and once(one) is not None)
            for name, parts in self._owned.items()
        ]
        found = torch.tensor(counts, device=next(iter(self._parts)).device)
        dist.all_reduce(found, group=group)
        for (name, shape), count in zip(self._shapes.items(), found.tolist(), strict=True):
            if count != shape.numel():
                raise ConfigError(
                    f"trainer.backend megatron has {count} of the {shape.numel()} elements of the model's {name}"
                )

    @torch.no_grad()
    def values(self, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each weight with its value in float32, from whole tensors by name; rows of padding are 0."""
        whole = lru_cache(maxsize=4)(read)  # Experts of a layer take turns with two.
        for parameter, parts in self._parts.items():
            value = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for part in parts:
                value[part.here].copy_(whole(part.name)[part.there])
            yield parameter, value

    @torch.no_grad()
    def whole(
        self, group: dist.ProcessGroup | None, value: Value = once, *, dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by name, joined from the ranks of a group (None: all), all of which call.

        `value` returns a tensor of a weight's shape, or None if this rank counts nothing of it. Bytes are added, not
        numbers: -0 plus 0 would be 0.
        """
        device = next(iter(self._parts)).device
        for name, shape in self._shapes.items():
            whole = torch.zeros(shape, dtype=dtype, device=device)
            for parameter, part in self._owned[name]:
                here = value(parameter) if part.counted else None
                if here is not None:
                    whole[part.there].copy_(here[part.here])
            dist.all_reduce(whole.view(-1).view(torch.uint8), group=group)
            yield name, whole
