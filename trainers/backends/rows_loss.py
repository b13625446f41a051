"""The loss of a micro-batch from its tokens' scores, and the sums that a backend reports of it."""

from collections.abc import Sequence

import torch

from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.backends.packing import moved
from asyncrl.trainers.backends.responses import token_values
from asyncrl.trainers.loss.objective import Clip, Proximal, Reference, TokenSums, policy_loss_sums

_SUMS = ("ratio", "clipped", "kl", "tokens", "weight", "used_weight", "truncated", "reference_kl")
_COUNTS = {"clipped", "tokens", "truncated"}
SUMS = 2 + len(_SUMS)
"""How many elements `sums_tensor` returns."""


def rows_loss(
    rows: Rows,
    logprobs: torch.Tensor,
    chosen: torch.Tensor,
    counts: Sequence[int],
    *,
    clip: Clip,
    importance_cap: float,
    reference_kl: float,
) -> TokenSums:
    """Sum the policy loss over the trained tokens, of which `logprobs` are.

    `chosen` flags them among the tokens of all responses, which have `counts` tokens. The loss adds `reference_kl`
    times the divergence from a reference, if the rows have its log-probabilities.
    """
    named = token_values(rows, counts, logprobs.dtype, reference=reference_kl > 0)
    together = moved(torch.stack([values[chosen] for values in named.values()]), logprobs.device)
    values = dict(zip(named, together, strict=True))
    proximal, reference = None, None
    if "proximal" in values:
        proximal = Proximal(values["proximal"], importance_cap)
    if "reference" in values:
        reference = Reference(values["reference"], values["scales"], reference_kl)
    return policy_loss_sums(
        logprobs,
        values["behaviour"],
        values["advantages"],
        torch.ones_like(logprobs, dtype=torch.bool),
        clip,
        proximal=proximal,
        reference=reference,
    )


def sums_tensor(loss: torch.Tensor, sums: TokenSums, entropies: torch.Tensor) -> torch.Tensor:
    """Return in one tensor, in float64, what `step_sums` reads: each copy from a device waits for it."""
    of_device = [loss, entropies.sum(), *(getattr(sums, name) for name in _SUMS)]
    return torch.stack([value.detach().double() for value in of_device])


def step_sums(values: torch.Tensor) -> StepSums:
    """Bring the sums from the device."""
    found = dict(zip(("loss", "entropy", *_SUMS), values.tolist(), strict=True))
    return StepSums(**{name: int(value) if name in _COUNTS else value for name, value in found.items()})
