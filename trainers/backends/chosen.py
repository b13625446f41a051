"""Log-probabilities of chosen tokens and entropies, some positions at a time: whole tables of logits do not fit.

Logits are positions times vocabulary: 16,384 tokens of a vocabulary of 150,000 take 9.8 GB in float32, several
times in a step. A backward pass computes them again, part by part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from asyncrl.trainers.backends.compiled import apart, compiled, fixed_width

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of N positions: log-probabilities of their tokens (N) and entropies in nats (N; no gradient), in float32 or
    float64.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor


def chosen_scores(
    logits_of: Logits,
    inputs: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    recompute: bool = True,
    fused: bool = False,
) -> Scores:
    """Return scores of `tokens` (N) under the logits (N, vocabulary) / temperature that `inputs` (N, …) give.

    Logits of at most `chunk` positions exist at a time. With `recompute` a backward pass computes them again.
    Without, they are kept in their own type, which costs nothing if `inputs` are the logits. With `fused` compiled
    kernels read logits without writing tables in float32.
    """
    # A single chunk is in memory whole at the backward pass in any case.
    again = recompute and torch.is_grad_enabled() and inputs.shape[0] > chunk
    # Split, not sliced: the gradient of each slice would be a tensor of all inputs' size.
    parts = zip(torch.split(inputs, chunk), torch.split(tokens, chunk), strict=True)
    found = [(_again if again else _once)(logits_of, some, few, temperature, fused) for some, few in parts]
    logprobs, entropies = zip(*found, strict=True)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _once(
    logits_of: Logits, inputs: torch.Tensor, tokens: torch.Tensor, temperature: float, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _Chosen.apply(logits_of(inputs), tokens, temperature, True, fused)  # type: ignore[no-any-return,no-untyped-call]


def _again(
    logits_of: Logits, inputs: torch.Tensor, tokens: torch.Tensor, temperature: float, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    first = True

    def run(some: torch.Tensor) -> Any:
        nonlocal first
        # The second time, in the backward pass, the results are known, and only the logits are of use.
        asked, first = first, False
        return _Chosen.apply(logits_of(some), tokens, temperature, asked, fused)  # type: ignore[no-untyped-call]

    return checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class _Chosen(torch.autograd.Function):
    """log softmax(logits / T) at the tokens, and the entropy; between the passes it keeps the logits as they came.

    With p the tempered distribution, d logprob / d logits = (1[token] - p) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, asked: bool, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(logits, tokens)
        # A compiler would make code for a single row that serves no other number.
        ctx.temperature, ctx.fused = temperature, fused and logits.shape[0] > 1
        if not asked:
            nothing = torch.empty(tokens.shape, dtype=_precise(logits), device=logits.device)
            entropies = torch.empty_like(nothing)
            ctx.mark_non_differentiable(entropies)
            return nothing, entropies
        if ctx.fused:
            logprobs, entropies = compiled(_read)(fixed_width(logits), apart(tokens), temperature)
        else:
            logprobs, entropies = _read_in_place(logits, tokens, temperature)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, tokens = ctx.saved_tensors
        if ctx.fused:
            derive = compiled(_derivative)
            gradient = derive(fixed_width(logits), apart(tokens), apart(gradients[0]), ctx.temperature)
        else:
            gradient = _derivative_in_place(logits, tokens, gradients[0], ctx.temperature)
        return gradient, None, None, None, None


def _read_in_place(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(_tempered(logits, temperature), dim=-1, dtype=_precise(logits))
    logprobs = table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # entr(p) = -p log p, and 0 where p is 0: there log p may be -inf.
    return logprobs, torch.special.entr(table.exp_(), out=table).sum(-1)


def _derivative_in_place(
    logits: torch.Tensor, tokens: torch.Tensor, gradient: torch.Tensor, temperature: float
) -> torch.Tensor:
    gradient = (gradient / temperature).unsqueeze(-1)
    table = torch.softmax(_tempered(logits, temperature), dim=-1, dtype=_precise(logits))
    table.mul_(-gradient).scatter_add_(-1, tokens.unsqueeze(-1), gradient)
    return table.to(logits.dtype)


def _read(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_read_in_place`, for a compiler, which computes the table again in place of writing it."""
    tempered = _tempered(logits.to(_precise(logits)), temperature)
    whole = tempered.logsumexp(-1, keepdim=True)
    logprobs = tempered.gather(-1, tokens.unsqueeze(-1)) - whole
    return logprobs.squeeze(-1), torch.special.entr((tempered - whole).exp()).sum(-1)


def _derivative(logits: torch.Tensor, tokens: torch.Tensor, gradient: torch.Tensor, temperature: float) -> torch.Tensor:
    """As `_derivative_in_place`, for a compiler."""
    tempered = _tempered(logits.to(_precise(logits)), temperature)
    p = (tempered - tempered.logsumexp(-1, keepdim=True)).exp()
    chosen = torch.arange(logits.shape[-1], device=logits.device) == tokens.unsqueeze(-1)
    return ((chosen.to(p.dtype) - p) * (gradient / temperature).unsqueeze(-1)).to(logits.dtype)


def _precise(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature == 1 else logits.to(_precise(logits)) / temperature
