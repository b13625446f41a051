"""The policy loss: PPO's clip on one ratio, with a dual clip; importance weights and a reference on request.

PPO (arXiv 1707.06347, eq. 7); asymmetric clip (DAPO, arXiv 2503.14476, eq. 8); dual clip (arXiv
1912.09729, eq. 5). By default the ratio is to the policy that sampled the tokens, so it corrects for
staleness as well. With a proximal policy the objective is decoupled (arXiv 2110.00641, section 3;
AReaL, arXiv 2505.24298, eq. 5): the ratio is to the proximal policy, and each token's loss is weighted
by π_proximal / π_sampler, truncated above.
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
class Proximal:
    """The policy at the start of the batch; weights towards the sampler's are truncated at `cap`."""

    logprobs: torch.Tensor
    cap: float


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model to stay close to. `scales` are the loss normalisation's factor of each token."""

    logprobs: torch.Tensor
    scales: torch.Tensor
    coefficient: float


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over trained tokens, to be divided by global counts; fillers and masked tokens add 0.

    `weight` is of importance weights as they are, `used_weight` as truncated, `truncated` how many were;
    0 without a proximal policy. `reference_kl` is the k3 estimate of KL(policy ‖ reference).
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    kl: torch.Tensor
    tokens: torch.Tensor
    weight: torch.Tensor
    used_weight: torch.Tensor
    truncated: torch.Tensor
    reference_kl: torch.Tensor


def policy_loss_sums(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: Clip,
    *,
    proximal: Proximal | None = None,
    reference: Reference | None = None,
) -> TokenSums:
    """Sum the loss over tokens where `mask` (bool) holds; all arguments have one shape.

    Masked tokens are selected away before the exponential, not multiplied by zero, so an infinite
    log-probability there does not matter. `kl` is the k3 estimate of KL(behaviour ‖ policy).
    """
    gap = _log_ratio(logprobs, behaviour_logprobs if proximal is None else proximal.logprobs, mask)
    ratio = gap.exp()
    clipped_ratio = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    nothing = torch.zeros((), dtype=loss.dtype, device=loss.device)
    weight, used, divergence = nothing, nothing, nothing
    if proximal is not None:
        weight = _log_ratio(proximal.logprobs, behaviour_logprobs, mask).exp()
        used = weight.clamp(max=proximal.cap)
        loss = loss * used
    total = torch.where(mask, loss, 0.0).sum()
    if reference is not None:
        divergence = _k3(_log_ratio(reference.logprobs, logprobs, mask))
        total = total + reference.coefficient * torch.where(mask, divergence * reference.scales, 0.0).sum()
    with torch.no_grad():
        outside = (ratio < 1 - clip.low) | (ratio > 1 + clip.high)
        behaviour_gap = gap if proximal is None else _log_ratio(logprobs, behaviour_logprobs, mask)
        kl = _k3(behaviour_gap)
    return TokenSums(
        loss=total,
        ratio=torch.where(mask, ratio.detach(), 0.0).sum(),
        clipped=(outside & mask).sum(),
        kl=torch.where(mask, kl.detach(), 0.0).sum(),
        tokens=mask.sum(),
        weight=torch.where(mask, weight, nothing).sum(),
        used_weight=torch.where(mask, used, nothing).sum(),
        truncated=((weight > used) & mask).sum(),
        reference_kl=torch.where(mask, divergence.detach(), nothing).sum(),
    )


def _log_ratio(of: torch.Tensor, to: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, of - to, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(gap: torch.Tensor) -> torch.Tensor:
    """Return r - 1 - log r for log r = log p - log q: over samples of q, unbiased for KL(q ‖ p), never negative.

    J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), the estimator k3.
    """
    return gap.exp() - 1 - gap
