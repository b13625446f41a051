"""The loss of a micro-batch from its tokens' scores, and the sums that a backend reports of it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.backends.packing import moved
from asyncrl.trainers.backends.responses import token_values
from asyncrl.trainers.backends.trained import where_trained
from asyncrl.trainers.loss.objective import Clip, Proximal, Reference, TokenSums, policy_loss_sums

SUMS = len(fields(StepSums))
"""How many elements `device_sums` returns."""


def loss_values(
    rows: Rows,
    chosen: torch.Tensor,
    counts: Sequence[int],
    *,
    reference: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return, per name, what the loss takes of each trained token, on a device.

    `chosen` flags them among the tokens of all responses, which have `counts` tokens. With `reference` also what it
    takes of the reference model, if the rows have its log-probabilities.
    """
    named = token_values(rows, counts, dtype, reference=reference)
    together = moved(where_trained(torch.stack(list(named.values())), chosen), device)
    return dict(zip(named, together, strict=True))


def rows_loss(
    values: Mapping[str, torch.Tensor],
    logprobs: torch.Tensor,
    *,
    clip: Clip,
    importance_cap: float,
    reference_kl: float,
) -> TokenSums:
    """Sum the policy loss over the trained tokens, of which `values` (see `loss_values`) and `logprobs` are.

    The loss adds `reference_kl` times the divergence from a reference, if there are values of one.
    """
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


def device_sums(loss: torch.Tensor, sums: TokenSums, entropies: torch.Tensor) -> torch.Tensor:
    """Return the values of DeviceSums in one tensor: each copy from a device waits for it."""
    own = {"loss": loss, "entropy": entropies.sum()}
    values = [own[one.name] if one.name in own else getattr(sums, one.name) for one in fields(StepSums)]
    return torch.stack([value.detach().double() for value in values])
