"""What passes through the stages of a replica."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.trainers.backends.layout import Layout

Outcome = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch: the layout of its rows, and the experts that their routers replay (places, layers, k), if any.

    On the last stage `finish` turns hidden states (positions, rows, width) into a loss and a result of `size` elements.
    """

    layout: Layout
    experts: torch.Tensor | None
    finish: Callable[[torch.Tensor], Outcome]
    size: int
