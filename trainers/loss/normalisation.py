"""The weight of each trained token in the loss, from counts over the whole batch, which the driver knows.

The ranks divide every token's loss by the number of trained tokens of the batch. A token's scale
turns that into another mean; the policy loss is linear in the advantage, so the scale travels as a
factor of the advantage, and ranks, micro-batches and fillers change nothing.
"""

from collections.abc import Mapping
from typing import Literal

Normalisation = Literal["token_mean", "sequence_mean", "constant"]


def token_scales(tokens: Mapping[str, int], how: Normalisation, *, constant: int) -> dict[str, float]:
    """Return by key the factor of each of its tokens, from trained tokens by key.

    token_mean: the mean over all trained tokens (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: the
    mean over samples of their token means (GRPO, arXiv 2402.03300, eq. 3). constant: the sum over
    tokens divided by samples times `constant`, the longest response (Dr. GRPO, arXiv 2503.20783, §3.2).
    """
    total, samples = sum(tokens.values()), len(tokens)
    if how == "token_mean":
        return dict.fromkeys(tokens, 1.0)
    if how == "constant":
        return dict.fromkeys(tokens, total / (samples * constant))
    return {key: total / (samples * count) if count else 0.0 for key, count in tokens.items()}
