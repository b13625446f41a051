"""One token per row from its distribution, and its log-probability in that distribution, all on the device.

A row's t-th token lies where its t-th number, drawn from its seed alone, falls in the cumulated distribution: neither
slot nor batch have a say in it.
"""

import numpy as np
import torch
from numpy.typing import NDArray


def uniform(seed: int, count: int) -> NDArray[np.float32]:
    """Return the first `count` numbers in [0, 1) of a seed (Philox: Salmon et al., Parallel Random Numbers, 2011)."""
    drawn = np.random.Generator(np.random.Philox(seed)).random(count).astype(np.float32)
    return np.minimum(drawn, np.float32(1 - 2**-24))


def sample(
    logits: torch.Tensor, draws: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and float32 log-probabilities (rows,) from `logits` (rows, vocabulary).

    `draws` (rows,) are in [0, 1), `temperature` (rows,) is above 0, and `kept` says which tokens may come.
    """
    scaled = logits.float() / temperature[:, None]
    if kept is not None:
        scaled = scaled.masked_fill(~kept, -torch.inf)
    shares = torch.softmax(scaled, dim=-1)
    cumulated = shares.cumsum(-1)
    total = cumulated[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(draws[:, None] * total, below)
    tokens = torch.searchsorted(cumulated, target, right=True).clamp(max=logits.shape[-1] - 1)
    # A parallel sum does not rise everywhere, to the last bit: a search may then end on a token that cannot come.
    tokens = torch.where(shares.gather(1, tokens) > 0, tokens, shares.argmax(-1, keepdim=True))
    return tokens[:, 0], shares.gather(1, tokens)[:, 0].log()


def keep(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return which tokens of (rows, vocabulary) may come; all parameters are (rows,).

    First the `top_k` likeliest (0: all); of these, renormalized, the likeliest up to a share of `top_p`, the one that
    reaches it included; of these all that are at least `min_p` times as likely as the likeliest.
    """
    ordered, order = (logits.float() / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    among = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    shares = torch.softmax(ordered.masked_fill(~among, -torch.inf), dim=-1)
    before = shares.cumsum(-1) - shares
    # At 1 nothing goes: rounding may have made up the sum before the last tokens.
    among &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    among &= shares >= min_p[:, None] * shares[:, :1]
    return torch.zeros_like(among).scatter(1, order, among)
