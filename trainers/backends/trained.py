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


def where_trained(values: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Return the values (…, tokens) where `flags` (tokens) hold: the values themselves where all do, as mostly."""
    return values if bool(flags.all()) else values[..., flags]


def trained_flags(rows: Rows) -> torch.Tensor:
    """Return flags of the tokens of all responses, one after another. A filler has no trained token."""
    generated = rows.generated or [""] * len(rows.tokens)
    counts = [ids.shape[0] - prompt for ids, prompt in zip(rows.tokens, rows.prompt_tokens, strict=True)]
    if rows.filler:
        return torch.zeros(sum(counts), dtype=torch.bool)
    return torch.cat(list(map(trained_tokens, counts, rows.withheld, generated)))
