"""How weights travel from the trainer to the generators."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

State = Mapping[str, torch.Tensor]


class WeightTransport(Protocol):
    """`send` on a trainer rank gives a handle that the controller passes on; `receive` opens it.

    A handle holds one whole version and stays readable while anybody holds it.
    """

    def send(self, state: State) -> Any: ...

    async def receive(self, handle: Any) -> dict[str, torch.Tensor]: ...


class InProcess:
    """The handle is a copy of the weights."""

    def send(self, state: State) -> Any:
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    async def receive(self, handle: Any) -> dict[str, torch.Tensor]:
        return dict(handle)
