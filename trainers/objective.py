"""The policy loss: PPO's clip on the one ratio to the behaviour policy, with a dual clip.

PPO (arXiv 1707.06347, eq. 7); asymmetric clip (DAPO, arXiv 2503.14476, eq. 8); dual clip (arXiv
1912.09729, eq. 5). The ratio is to the policy that sampled the tokens, so it corrects for
staleness as well.
"""

from dataclasses import dataclass

import torch

# exp(±20) is within float32; beyond it the ratio is clipped in any case.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Clip:
    low: float
    high: float
    dual: float


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over trained tokens, to be divided by global counts; fillers and masked tokens add 0."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl: torch.Tensor
    tokens: torch.Tensor


def policy_loss_sums(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: Clip,
) -> TokenSums:
    """Sum the loss over tokens where `mask` (bool) holds; all arguments have one shape.

    Masked tokens are selected away before the exponential, not multiplied by zero, so an infinite
    log-probability there does not matter. `kl` is the k3 estimate of KL(behaviour ‖ policy).
    """
    gap = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    gap = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = gap.exp()
    clipped_ratio = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    with torch.no_grad():
        outside = (ratio < 1 - clip.low) | (ratio > 1 + clip.high)
        kl = ratio - 1 - gap
    return TokenSums(
        loss=torch.where(mask, loss, 0.0).sum(),
        ratio=torch.where(mask, ratio.detach(), 0.0).sum(),
        clipped=(outside & mask).sum(),
        kl=torch.where(mask, kl.detach(), 0.0).sum(),
        tokens=mask.sum(),
    )
