"""What the driver sends a rank for one step, and what comes back. Metadata only."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.engine.records.plan import MicroBatch


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's part of a plan; by key its advantage, prompt tokens, and leading response tokens withheld.

    `total_tokens` is the number of trained tokens over all ranks, by which the loss is divided.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    advantages: Mapping[str, float]
    prompt_tokens: Mapping[str, int]
    withheld: Mapping[str, int]
    total_tokens: int


@dataclass(frozen=True, slots=True)
class RankResult:
    """Sums over this rank's trained tokens (the loss already divided by `total_tokens`).

    `seconds` is what its micro-batches took, without waiting for rows or for other ranks.
    """

    loss: float
    ratio_sum: float
    clipped: int
    kl_sum: float
    tokens: int
    grad_norm: float
    seconds: float = 0.0
