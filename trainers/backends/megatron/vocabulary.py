"""Log-probabilities and entropies where each tensor rank has the logits of a part of the vocabulary.

Some positions at a time, and a backward pass computes their logits again, as in `chosen` for a whole vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from asyncrl.trainers.backends.chosen import Scores

_BELOW_ALL = -1e30
"""A logit of padding. With -inf the entropy would have a product of 0 and infinity."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids from `first` on are this rank's, of `size`; columns over that are padding. `group`: its siblings."""

    first: int
    size: int
    group: dist.ProcessGroup

    def scores(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        *,
        temperature: float,
        chunk: int,
    ) -> Scores:
        """Return scores of `tokens` (N) under the logits / temperature that hidden states (N, width) give.

        All ranks of the group call, with equal tokens; they get equal scores.
        """
        again = torch.is_grad_enabled() and hidden.shape[0] > chunk
        # Split, not sliced: the gradient of each slice would be a tensor of all inputs' size.
        parts = zip(torch.split(hidden, chunk), torch.split(tokens, chunk), strict=True)
        found = [self._run(logits_of, some, few, temperature, again=again) for some, few in parts]
        logprobs, entropies = zip(*found, strict=True)
        return Scores(torch.cat(logprobs), torch.cat(entropies))

    def _run(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        *,
        again: bool,
    ) -> Any:
        """Return log-probabilities and entropies of some positions; `again`: a backward pass computes their logits."""
        known: list[torch.Tensor] = []

        def run(some: torch.Tensor) -> Any:
            return _Chosen.apply(logits_of(some), tokens, temperature, self, known)  # type: ignore[no-untyped-call]

        return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False) if again else run(hidden)


class _Chosen(torch.autograd.Function):
    """log softmax(logits / T) at the tokens, and the entropy, which has no gradient.

    With p the tempered distribution, d logprob / d logits = (1[token] - p) / T, for each rank's columns. `known` is
    empty, or holds log sum exp(logits / T) of the whole vocabulary from a first time: then only the logits are of use.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        part: Vocabulary,
        known: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature, ctx.part = temperature, part
        if known:
            ctx.save_for_backward(logits, tokens, known[0])
            nothing = torch.empty_like(known[0])
            entropies = torch.empty_like(nothing)
            ctx.mark_non_differentiable(entropies)
            return nothing, entropies
        table = logits.float() / temperature
        table[:, max(0, part.size - part.first) :] = _BELOW_ALL
        highest = table.max(-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
        table -= highest.unsqueeze(-1)
        column, here = _columns(tokens, part.first, table.shape[1])
        chosen = torch.where(here, table.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
        weights = table.exp()
        sums = torch.stack([weights.sum(-1), (weights * table).sum(-1), chosen])
        dist.all_reduce(sums, group=part.group)
        whole, weighted, chosen = sums
        known.append(highest + whole.log())
        ctx.save_for_backward(logits, tokens, known[0])
        entropies = whole.log() - weighted / whole
        ctx.mark_non_differentiable(entropies)
        return chosen - whole.log(), entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, tokens, whole = ctx.saved_tensors
        gradient = (gradients[0] / ctx.temperature).unsqueeze(-1)
        table = (logits.float() / ctx.temperature - whole.unsqueeze(-1)).exp_()
        table[:, max(0, ctx.part.size - ctx.part.first) :] = 0.0
        column, here = _columns(tokens, ctx.part.first, table.shape[1])
        table.mul_(-gradient).scatter_add_(-1, column.unsqueeze(-1), gradient * here.unsqueeze(-1))
        return table.to(logits.dtype), None, None, None, None


def _columns(tokens: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's column on this rank, 0 for those of other ranks, and which are of this one."""
    here = (tokens >= first) & (tokens < first + columns)
    return torch.where(here, tokens - first, 0), here
