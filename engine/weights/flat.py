"""Weights as one run of bytes, and where in it each tensor lies."""

from dataclasses import dataclass

import torch

from asyncrl.engine.weights.base import State

_ALIGNED_BYTES = 64
"""A tensor begins at a multiple of so many bytes, so that a view of any type may begin there."""


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie in `bytes` bytes. Example, two float32 numbers and one: at 0 to 8, and at 64 to 68 of 128."""

    places: tuple[_Place, ...]
    bytes: int

    @classmethod
    def of(cls, state: State) -> "Layout":
        """Lay the tensors out in their order."""
        places, at = [], 0
        for name, tensor in state.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append(_Place(name, dtype, tuple(tensor.shape), at, at + tensor.nbytes))
            at = -(-places[-1].stop // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return cls(tuple(places), at)

    @property
    def starts(self) -> dict[str, int]:
        """Where each tensor begins, in their order."""
        return {place.name: place.start for place in self.places}

    def pack(self, state: State, flat: torch.Tensor) -> None:
        """Copy tensors into `flat`, uint8 (bytes,), of any device."""
        for name, view in self.views(flat).items():
            view.copy_(state[name].detach())

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that lie in `flat`, uint8 (bytes,), as views."""
        return {
            place.name: flat[place.start : place.stop].view(getattr(torch, place.dtype)).reshape(place.shape)
            for place in self.places
        }
