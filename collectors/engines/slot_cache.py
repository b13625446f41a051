"""The key-value cache of all slots, allocated once: each row writes behind its own tokens.

Invariant: a slot's positions below its row's are those of its own sequence; what lies above is never attended to, and
is overwritten before it is. Tensors keep their addresses, so that a captured graph stays valid, until the cache leaves
its device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache

from asyncrl.engine.errors import ConfigError

Shape = tuple[int, int, int]
"""Key heads, width of a key, width of a value."""


class ShapeProbe(Cache):  # type: ignore[misc]
    """Stores nothing, and records what each layer would store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, Shape] = {}
        self.dtype = torch.float32

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self.dtype = key_states.dtype
        return key_states, value_states


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of `slots` sequences of at most `length` tokens, for the layers that `shapes` lists."""

    def __init__(
        self, shapes: Mapping[int, Shape], *, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self._shapes = dict(shapes)
        self._slots, self._length = slots, length
        self._dtype, self._device = dtype, device
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._stacks: list[torch.Tensor] = []
        self._away: list[torch.Tensor] = []
        self._allocate()
        self._filling: torch.Tensor | None = None
        self._rows = torch.empty(0)
        self._positions = torch.empty(0)
        self._window = 0

    def _allocate(self) -> None:
        for shape in dict.fromkeys(self._shapes.values()):
            layers = [layer for layer, found in self._shapes.items() if found == shape]
            heads, *widths = shape
            # Zeros: what is never attended to is still multiplied, and must be a number.
            keys, values = (
                torch.zeros(
                    len(layers), self._slots, heads, self._length, width, dtype=self._dtype, device=self._device
                )
                for width in widths
            )
            # Layers of one shape lie in one tensor: copying a slot is then one operation, not one per layer.
            self._stacks += [keys, values]
            for i, layer in enumerate(layers):
                self._keys[layer], self._values[layer] = keys[i], values[i]

    def leave(self, slots: int, length: int) -> None:
        """Free the device's memory; what the first `slots` hold below position `length` goes to the host's."""
        length = min(length, self._length)
        self._away = [_copied(stack, slots, length) for stack in self._stacks]
        self._stacks, self._keys, self._values = [], {}, {}

    def come_back(self) -> None:
        """Allocate the cache again, and put in what went to the host's memory."""
        self._allocate()
        for stack, away in zip(self._stacks, self._away, strict=True):
            stack[:, : away.shape[1], :, : away.shape[3]] = away
        self._away = []

    @property
    def bytes(self) -> int:
        """What it takes of its device now."""
        return sum(stack.nbytes for stack in self._stacks)

    @staticmethod
    def token_bytes(shapes: Mapping[int, Shape], dtype: torch.dtype) -> int:
        """Return what one token takes in all layers."""
        return sum(heads * (key + value) for heads, key, value in shapes.values()) * dtype.itemsize

    def fill(self, slots: torch.Tensor) -> None:
        """Have the next forward pass, over whole sequences (B, L), write to `slots` (B,) from position 0."""
        self._filling = slots

    def decode(self, rows: torch.Tensor, positions: torch.Tensor, window: int) -> None:
        """Have the next forward pass, one token per row, write row i at positions[i] of slot i, and see `window`."""
        self._filling = None
        self._rows, self._positions, self._window = rows, positions, window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._filling is not None:
            # Padding behind a shorter sequence is written too, above its row's position.
            length = key_states.shape[2]
            self._keys[layer_idx][self._filling, :, :length] = key_states
            self._values[layer_idx][self._filling, :, :length] = value_states
            return key_states, value_states
        if torch.compiler.is_compiling():
            # `slot_attention` appends, in the compiled step and unseen by it.
            return key_states, value_states
        return self.append(layer_idx, key_states, value_states)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row, (rows, heads, 1, width), as `decode` said; return the rows' keys and values."""
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        rows = len(self._rows)
        return keys[:rows, :, : self._window], values[:rows, :, : self._window]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources` to `targets`, which are none of them."""
        for stack in self._stacks:
            stack[:, targets, :, :length] = stack[:, sources, :, :length]


def _copied(stack: torch.Tensor, slots: int, length: int) -> torch.Tensor:
    """Copy the first `length` positions of the first `slots` to the host's memory."""
    shape = (stack.shape[0], slots, stack.shape[2], length, stack.shape[4])
    away = torch.empty(shape, dtype=stack.dtype, pin_memory=stack.is_cuda)
    # Layer by layer: a part of a tensor is first gathered on the device, which may have little room left.
    for to, layer in zip(away, stack, strict=True):
        to.copy_(layer[:slots, :, :length])
    return away


def slots_within(cache_bytes: int, *, length: int, token_bytes: int, rows: int) -> int:
    """Return how many slots of `length` tokens fit into `cache_bytes`, at most `rows`; ConfigError if not one does.

    16 slots of 320 tokens of SmolLM2-135M in bfloat16 (23,040 bytes per token) take 118 MB.
    """
    needed = length * token_bytes
    slots = min(rows, cache_bytes // needed)
    if slots < 1:
        raise ConfigError(
            f"one sequence of {length} tokens needs {needed} bytes of key-value cache and the budget is {cache_bytes}; "
            "raise it (collector.cache_gib) or shorten prompts and responses"
        )
    return slots
