"""Flat copies of versions, for as long as somebody may read them.

Invariant: a buffer is written once per version, and again only after that version was forgotten.
"""

import threading
from dataclasses import dataclass
from itertools import count

import torch

from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import State
from asyncrl.engine.weights.flat import Layout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version: `flat` is uint8 (bytes,), laid out as `layout` says."""

    number: int
    layout: Layout
    flat: torch.Tensor


class Snapshots:
    """Copies on the weights' own device; buffers are allocated once and used in turn. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._kept: dict[int, Snapshot] = {}
        self._free: list[torch.Tensor] = []

    def take(self, state: State) -> Snapshot:
        """Copy a version; it is whole when this returns, on a GPU too."""
        layout = Layout.of(state)
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        flat = self._buffer(layout.bytes, device)
        layout.pack(state, flat)
        if flat.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        with self._lock:
            taken = Snapshot(next(self._numbers), layout, flat)
            self._kept[taken.number] = taken
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
                self._free.append(gone.flat)

    def _buffer(self, size: int, device: torch.device) -> torch.Tensor:
        with self._lock:
            self._free = [flat for flat in self._free if flat.numel() == size and flat.device == device]
            if self._free:
                return self._free.pop()
        # Zeros, because what lies between two tensors travels too.
        return torch.zeros(size, dtype=torch.uint8, device=device)
