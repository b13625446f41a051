"""Which tokens of a response are trained: generated ones that are not withheld."""

import torch

from asyncrl.engine.records.generated import read_generated
from asyncrl.trainers.backends.base import Rows


def trained_tokens(tokens: int, withheld: int, generated: str) -> torch.Tensor:
    """Return flags (response) for a response of `tokens` tokens; `generated` is the text of its generated places.

    Of 5 tokens, with 1 withheld and `0:2,4:5` generated, those at 1 and 4 are trained.
    """
    flags = torch.zeros(tokens, dtype=torch.bool)
    for first, end in read_generated(generated, tokens):
        flags[first:end] = True
    flags[:withheld] = False
    return flags


def trained_mask(rows: Rows, shape: torch.Size) -> torch.Tensor:
    """Return flags (B, L - 1): at t, whether the token at t + 1 is trained. A filler has none."""
    mask = torch.zeros(shape, dtype=torch.bool)
    if rows.filler:
        return mask
    generated = rows.generated or [""] * len(rows.tokens)
    for i, (ids, prompt) in enumerate(zip(rows.tokens, rows.prompt_tokens, strict=True)):
        tokens = ids.shape[0] - prompt
        mask[i, prompt - 1 : prompt - 1 + tokens] = trained_tokens(tokens, rows.withheld[i], generated[i])
    return mask
