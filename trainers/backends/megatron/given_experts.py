"""Router replay in megatron: a layer's router takes the experts that rows bring, and weighs them by itself.

megatron's own replay needs a choice for every position, and tells no micro-batch of a pipeline from another when layers
are computed again.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Choice = tuple[torch.Tensor, torch.Tensor]


class GivenExperts:
    """What one layer's router asks as it would ask a replay of megatron's.

    Micro-batches end in the order in which they began. Where layers are computed again, a pipeline has begun the next
    ones by then; so what a micro-batch was given waits for its backward pass.
    """

    def __init__(self, *, recomputes: bool) -> None:
        self._recomputes = recomputes
        self._now: torch.Tensor | None = None
        self._again: deque[torch.Tensor | None] = deque()

    def take(self, experts: torch.Tensor | None) -> None:
        """Give `experts` (positions, k) to the micro-batch that begins; -1 and None: the router chooses by itself."""
        self._now = experts
        if self._recomputes and torch.is_grad_enabled():
            self._again.append(experts)

    def forget(self) -> None:
        """Keep nothing of micro-batches that an error has ended."""
        self._now = None
        self._again.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """Return (scores, indices) of each position's experts, both (positions, k). Name and signature: megatron's."""
        assert default_compute_topk is not None, "megatron's router says how it chooses"
        # Layers that are computed again run without gradients first, and with them in the backward pass.
        given = self._again.popleft() if self._recomputes and torch.is_grad_enabled() else self._now
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if given is None:
            return values, own
        chosen = torch.where((given >= 0).all(-1, keepdim=True), given, own)
        return scores.gather(1, chosen), chosen


def give_experts(model: Any, *, recomputes: bool) -> dict[int, GivenExperts]:
    """Have the routers of this stage ask for experts; return whom they ask, by the layer's number from 0."""
    asked = {layer.layer_number - 1: GivenExperts(recomputes=recomputes) for layer in model.decoder.layers}
    for layer in model.decoder.layers:
        layer.mlp.router.router_replay = asked[layer.layer_number - 1]
    return asked
