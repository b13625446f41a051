"""What a trainer rank asks of a backend: gradients in pieces, then one update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.engine.weights.base import State


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch of B samples: ids (L_i), behaviour log-probabilities (response_i), advantages.

    The first `withheld` tokens of a response are context alone: too old to be trained on.
    A filler's rows go through the model and add nothing.
    """

    tokens: Sequence[torch.Tensor]
    logprobs: Sequence[torch.Tensor]
    prompt_tokens: Sequence[int]
    advantages: Sequence[float]
    withheld: Sequence[int]
    filler: bool


@dataclass(slots=True)
class StepSums:
    """Sums over trained tokens so far."""

    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    tokens: int = 0


class Backend(Protocol):
    """A replica of the model with its optimizer."""

    def accumulate(self, rows: Rows, total_tokens: int) -> StepSums:
        """Add the gradient of this micro-batch's loss sum / `total_tokens`; return its sums."""

    def log_ratios(self, rows: Rows) -> list[torch.Tensor]:
        """Return per sample log π - log π_sampler of its trained tokens; no gradient."""

    def accumulate_supervised(self, tokens: Sequence[torch.Tensor], prompt_tokens: Sequence[int], total: int) -> float:
        """Add the gradient of the negative log-likelihood of the answers / `total` tokens; return its part."""

    def gradients(self) -> torch.Tensor:
        """Return all accumulated gradients as one flat tensor, and forget them."""

    def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
        """Clip summed gradients to the maximal norm, update the weights; return the norm before clipping."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (after the warm-up)."""

    def state(self) -> State:
        """Return the weights to publish."""
