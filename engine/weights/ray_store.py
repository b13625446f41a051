"""Weights through Ray's object store: one object per version, read without a copy on its node."""

import warnings
from itertools import count
from typing import Any

import numpy as np
import ray
import torch

from asyncrl.engine.weights.base import Offer, Sent, State, WeightTransport


class RayObjectStore(WeightTransport):
    """The content is a list with one object reference, so that Ray does not resolve it on the way.

    Ray removes the object once nobody holds the reference.
    """

    def __init__(self) -> None:
        self._numbers = count()

    def send(self, state: State) -> Sent:
        packed = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor))
            for name, tensor in state.items()
        }
        size = sum(data.nbytes for _, _, data in packed.values())
        return Sent([ray.put(packed)], next(self._numbers), size)

    async def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        packed = await offer.content[0]
        with warnings.catch_warnings():
            # The store's memory is read only, and so is what `receive` returns.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return {
                name: torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
                for name, (dtype, shape, data) in packed.items()
            }


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's bytes; bfloat16 has no NumPy type of its own."""
    flat: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
