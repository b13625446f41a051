"""Flat copies of versions, for as long as somebody may read them.

Invariant: a buffer is written once per version, and again only after that version was forgotten.
"""

import threading
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.flat import Layout


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for one version after the other, uint8. `handle` is what a transport made once to share it."""

    memory: torch.Tensor
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version, at the beginning of its buffer."""

    number: int
    layout: Layout
    buffer: Buffer

    @property
    def flat(self) -> torch.Tensor:
        """The version, uint8 (bytes,), as the layout says."""
        return self.buffer.memory[: self.layout.bytes]


class Snapshots:
    """Copies on `device`, or else on the weights' own, in buffers that are used in turn. Any thread may call."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._numbers = count()
        self._kept: dict[int, Snapshot] = {}
        self._free: list[Buffer] = []

    def take(self, state: State) -> Snapshot:
        """Copy a version; it is whole when this returns, on a GPU too."""
        layout = Layout.of(state)
        device = self._device or next((tensor.device for tensor in state.values()), torch.device("cpu"))
        with self._lock:
            taken = Snapshot(next(self._numbers), layout, self._buffer(layout.bytes, device))
            self._kept[taken.number] = taken
        layout.pack(state, taken.flat)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return taken

    def get(self, number: int) -> Snapshot:
        """Return a version that is kept; VersionError if it was forgotten."""
        with self._lock:
            if number not in self._kept:
                raise VersionError(f"the weights sent as number {number} were forgotten; kept are {[*self._kept]}")
            return self._kept[number]

    def forget(self, number: int) -> None:
        """Give a version's buffer back; nothing happens if it is gone."""
        with self._lock:
            gone = self._kept.pop(number, None)
            if gone is not None:
                self._free.append(gone.buffer)

    def _buffer(self, size: int, device: torch.device) -> Buffer:
        """Return the smallest free buffer that is large enough, or a new one in place of all that are too small.

        What changed between versions is of another size each time: what replaces a buffer has a quarter more.
        """
        self._free.sort(key=lambda buffer: buffer.memory.numel())
        for place, buffer in enumerate(self._free):
            if buffer.memory.numel() >= size and buffer.memory.device == device:
                return self._free.pop(place)
        more = size // 4 if self._free else 0
        self._free.clear()
        # Zeros, because what lies between two tensors travels too.
        return Buffer(torch.zeros(size + more, dtype=torch.uint8, device=device))
