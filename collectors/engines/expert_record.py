"""Which experts the native engine's routers chose for each token of each slot, kept on the device.

Invariant: the row of a position is what the pass chose that first took its token; a cache that is made anew under other
weights does not change it, because the tokens behind it were sampled with the first.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.engine.model.routers import routers_of

Experts = npt.NDArray[np.int16]
"""Chosen experts (tokens, layers, k); -1 where none is known."""


class ExpertRecord:
    """Holds (slots, length, layers, k) numbers of two bytes: 4,096 tokens of 48 layers with 8 experts take 3 MiB."""

    def __init__(self, model: Any, *, slots: int, length: int, device: torch.device) -> None:
        routers = routers_of(model)
        shape = (slots, length, len(routers), routers[0].top_k)
        self._experts = torch.full(shape, -1, dtype=torch.int16, device=device)
        self._at: tuple[torch.Tensor, torch.Tensor] | None = None
        self._hooks = [router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(routers)]

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def write_to(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Have the next pass's choices go to positions (n, T) of slots (n)."""
        self._at = slots[:, None], positions

    def stop(self) -> None:
        """Let passes choose unrecorded."""
        self._at = None

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to others."""
        self._experts[targets, :length] = self._experts[sources, :length]

    def read(self, slot: int, tokens: int) -> Experts:
        """Return the rows of a slot's first `tokens` positions; waits for the device."""
        return self._experts[slot, :tokens].to("cpu", copy=True).numpy()

    def _hook(self, layer: int) -> Any:
        def chosen(_router: Any, _inputs: Any, output: Any) -> None:
            if self._at is not None:
                slots, positions = self._at
                self._experts[slots, positions, layer] = output[2].view(*positions.shape, -1).to(torch.int16)

        return chosen


def joined(before: Experts | None, after: Experts, tokens: int) -> Experts:
    """Return `after` with the rows of the first `tokens` positions as they were `before`."""
    if before is None or tokens < 1:
        return after
    return np.concatenate([before[:tokens], after[tokens:]])


def with_missing(rows: Experts, tokens: int) -> Experts:
    """Return rows for `tokens` positions, -1 in those behind the last one."""
    missing = np.full((tokens - len(rows), *rows.shape[1:]), -1, dtype=np.int16)
    return np.concatenate([rows, missing])
