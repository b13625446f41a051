"""The routers of a mixture of experts: which modules of a model choose the experts of each token.

A router gives (logits, weights, indices) of tokens (N, width): softmax over all experts, the largest k of them, their
probabilities divided by their sum (but for Qwen3 with `norm_topk_prob` false).
"""

from typing import Any

import torch

from asyncrl.engine.errors import ConfigError

KNOWN = ("MixtralTopKRouter", "Qwen3MoeTopKRouter")
"""transformers' classes whose choice can be recorded and replayed."""


def has_routers(model: Any) -> bool:
    """Return whether a model chooses experts by a router that is known."""
    return any(type(module).__name__ in KNOWN for module in model.modules())


def routers_of(model: Any) -> list[Any]:
    """Return a model's routers in the order of its layers; ConfigError if it has none that is known."""
    found = [module for module in model.modules() if type(module).__name__ in KNOWN]
    if not found:
        raise ConfigError(
            f"trainer.router_replay is true, and {type(model).__name__} has no router that is known "
            f"({', '.join(KNOWN)}); it must be false, or the model Mixtral or Qwen3-MoE"
        )
    if len({router.top_k for router in found}) > 1:
        raise ConfigError(
            f"the layers of {type(model).__name__} choose different numbers of experts; set router_replay off"
        )
    return found


class Replay:
    """Has a model's routers take given experts, and weigh them by their own softmax; until `close`."""

    def __init__(self, model: Any) -> None:
        self.routers = routers_of(model)
        self._experts: torch.Tensor | None = None
        self._hooks = [router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(self.routers)]

    def take(self, experts: torch.Tensor | None) -> None:
        """Replay `experts` (positions, layers, k) in the next pass, and where its backward pass computes layers again.

        A position of which -1 is given chooses by itself; with None all do.
        """
        self._experts = experts

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        def replayed(router: Any, _inputs: Any, output: Any) -> Any:
            if self._experts is None:
                return None
            logits, weights, own = output
            given = self._experts[:, layer]
            chosen = torch.where((given >= 0).all(-1, keepdim=True), given, own)
            found = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
            if getattr(router, "norm_topk_prob", True):
                found = found / found.sum(dim=-1, keepdim=True)
            return logits, found.to(weights.dtype), chosen

        return replayed
