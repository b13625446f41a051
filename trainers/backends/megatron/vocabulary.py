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

        def run(some: torch.Tensor, few: torch.Tensor) -> Any:
            return _Chosen.apply(logits_of(some), few, temperature, self)  # type: ignore[no-untyped-call]

        # Split, not sliced: the gradient of each slice would be a tensor of all inputs' size.
        parts = zip(torch.split(hidden, chunk), torch.split(tokens, chunk), strict=True)
        found = [
            checkpoint(run, *part, use_reentrant=False, preserve_rng_state=False) if again else run(*part)
            for part in parts
        ]
        logprobs, entropies = zip(*found, strict=True)
        return Scores(torch.cat(logprobs), torch.cat(entropies))


class _Chosen(torch.autograd.Function):
    """log softmax(logits / T) at the tokens, and the entropy, which has no gradient.

    With p the tempered distribution, d logprob / d logits = (1[token] - p) / T, for each rank's columns.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, part: Vocabulary
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        ctx.save_for_backward(logits, tokens, highest + whole.log())
        ctx.temperature, ctx.part = temperature, part
        entropies = whole.log() - weighted / whole
        ctx.mark_non_differentiable(entropies)
        return chosen - whole.log(), entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, tokens, whole = ctx.saved_tensors
        gradient = (gradients[0] / ctx.temperature).unsqueeze(-1)
        table = (logits.float() / ctx.temperature - whole.unsqueeze(-1)).exp_()
        table[:, max(0, ctx.part.size - ctx.part.first) :] = 0.0
        column, here = _columns(tokens, ctx.part.first, table.shape[1])
        table.mul_(-gradient).scatter_add_(-1, column.unsqueeze(-1), gradient * here.unsqueeze(-1))
        return table.to(logits.dtype), None, None, None


def _columns(tokens: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's column on this rank, 0 for those of other ranks, and which are of this one."""
    here = (tokens >= first) & (tokens < first + columns)
    return torch.where(here, tokens - first, 0), here
