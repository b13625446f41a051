"""Router replay (R3): a training pass takes the experts that were chosen while sampling, and weighs them itself.

A router whose choices are nearly tied chooses otherwise in another precision, kernel or batch, and a token's
log-probability then jumps by far more than rounding explains. With the choice given, the weights are still the router's
own softmax over all experts, of the chosen ones and divided by their sum, so gradients reach the router through them.
Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370).

Invariant: a position without a known choice (-1), such as padding, and every pass without given choices, is routed as
the model routes by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.model.routers import Replay
from asyncrl.engine.records.columns import ROUTED_EXPERTS
from asyncrl.trainers.backends.layout import Layout, runs

Extras = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Routing:
    """A mixture of `layers`, in each of which a token takes `chosen` of the `experts`."""

    layers: int
    chosen: int
    experts: int

    @classmethod
    def of(cls, replay: Replay) -> "Routing":
        first = replay.routers[0]
        return cls(len(replay.routers), first.top_k, first.weight.shape[0])

    def placed(self, rows: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
        """Return choices (positions of the pass, layers, k), -1 where no sample stands.

        AsyncRLError for a sample whose rows are not one per token, or not of this model's layers and experts.
        """
        layers, k, known = self.layers, self.chosen, self.experts
        for row, tokens in zip(rows, layout.lengths.tolist(), strict=True):
            if row.shape != (tokens, layers, k):
                raise AsyncRLError(
                    f"{ROUTED_EXPERTS} of a sample have the shape {tuple(row.shape)}; {tokens} tokens, {layers} layers "
                    f"and {k} experts per token need {(tokens, layers, k)}"
                )
        flat = torch.cat(list(rows)).long()
        if flat.numel() and not -1 <= int(flat.min()) <= int(flat.max()) < known:
            raise AsyncRLError(f"{ROUTED_EXPERTS} name expert {int(flat.max())}; the model has {known}")
        placed = torch.full((layout.ids.numel(), layers, k), -1)
        placed[runs(layout.starts, layout.lengths)] = flat
        return placed


def without_experts(extras: Extras) -> Extras:
    """Return the extras that the model is given by name."""
    return {name: values for name, values in extras.items() if name != ROUTED_EXPERTS}
