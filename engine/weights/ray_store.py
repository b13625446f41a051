"""Weights through Ray's object store: one object per version, read without a copy on its node."""

from typing import Any

import numpy as np
import ray
import torch

from asyncrl.engine.weights.base import State


class RayObjectStore:
    """The handle is a list with one object reference, so that Ray does not resolve it on the way."""

    def send(self, state: State) -> Any:
        packed = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
            for name, tensor in state.items()
        }
        return [ray.put(packed)]

    async def receive(self, handle: Any) -> dict[str, torch.Tensor]:
        packed = await handle[0]
        return {
            name: torch.from_numpy(np.array(data)).view(getattr(torch, dtype)).reshape(shape)
            for name, (dtype, shape, data) in packed.items()
        }


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's bytes; bfloat16 has no NumPy type of its own."""
    flat: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
