"""FLOPs of samples from the model's own configuration.

Only matrix products count, with two FLOPs per multiply-add: projections, feed-forward layers and the head are linear
in the tokens, attention is linear in the pairs of positions that attend. Norms, activations, rotary embeddings and
the embedding's look-up are left out, because their time is small.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
UNGATED = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi"})
UNGATED_TOO = frozenset({"mpt", "nemotron", "persimmon", "starcoder2"})
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
PASSES = 3.0
"""Forward and backward, in units of the forward's FLOPs (Kaplan et al. 2020, section 2.1, C = 6N)."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs to train a sample of n tokens: PASSES * (linear * n + sum over windows of pair FLOPs * pairs(n, window)).

    `attention` holds (window, FLOPs of one pair of positions over all layers with that window); window 0 stands for
    no window. Kernels are causal: they skip the pairs above the diagonal and outside the window.
    """

    linear: float
    attention: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, config: Any) -> "CostModel":
        """Read a Hugging Face configuration, an object or a mapping; ValueError if it lacks something."""
        fields = _fields(config)
        layers, hidden = _number(fields, "num_hidden_layers"), _number(fields, "hidden_size")
        projections, pair = _attention(fields)
        feed_forward = sum(_feed_forward(fields, layer) for layer in range(layers))
        head = hidden * _number(fields, "vocab_size")
        windows = Counter(_window(fields, layer) for layer in range(layers))
        attention = tuple((window, 2.0 * pair * count) for window, count in sorted(windows.items()))
        return cls(2.0 * (layers * projections + feed_forward + head), attention)

    def flops(self, tokens: Ints) -> Floats:
        """Return the FLOPs of samples of these numbers of tokens."""
        length = np.asarray(tokens, np.float64)
        total = self.linear * length
        for window, pair in self.attention:
            total = total + pair * _pairs(length, window)
        return PASSES * total


def _pairs(length: Floats, window: int) -> Floats:
    """Return the pairs of positions that attend: n(n + 1) / 2, and at most `window` per position."""
    reach = np.minimum(length, window) if window else length
    return reach * (reach + 1) / 2 + (length - reach) * reach


def _fields(config: Any) -> Mapping[str, Any]:
    fields = config if isinstance(config, Mapping) else config.to_dict()
    text = fields.get("text_config")
    return _fields(text) if text is not None else fields


def _get(fields: Mapping[str, Any], name: str) -> Any:
    for known in (name, *ALIASES.get(name, ())):
        if fields.get(known) is not None:
            return fields[known]
    return None


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = _get(fields, name)
    if value is None:
        raise ValueError(f"the model's configuration has no {name}, which its FLOPs depend on")
    return int(value)


def _attention(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return a layer's multiply-adds: of the projections per token, of scores and values per pair of positions.

    Grouped-query heads (Ainslie et al. 2023) share keys and values; latent attention (DeepSeek-V2, section
    2.1) projects queries, keys and values down and up again.
    """
    hidden, heads = _number(fields, "hidden_size"), _number(fields, "num_attention_heads")
    latent = _get(fields, "kv_lora_rank")
    if latent:
        rope, value = _number(fields, "qk_rope_head_dim"), _number(fields, "v_head_dim")
        content = _number(fields, "qk_nope_head_dim")
        query, rank = heads * (content + rope), _get(fields, "q_lora_rank")
        down = hidden * (latent + rope) + (hidden * rank if rank else 0)
        up = (rank or hidden) * query + latent * heads * (content + value)
        return down + up + heads * value * hidden, heads * (content + rope + value)
    size = _get(fields, "head_dim") or hidden // heads
    shared = _get(fields, "num_key_value_heads") or (1 if _get(fields, "multi_query") else heads)
    return 2 * hidden * size * (heads + shared), 2 * heads * size


def _feed_forward(fields: Mapping[str, Any], layer: int) -> int:
    """Return the multiply-adds of a layer's feed-forward part per token: active and shared experts, and the router."""
    hidden = _number(fields, "hidden_size")
    matrices = 2 if fields.get("model_type") in UNGATED | UNGATED_TOO else 3
    experts = _get(fields, "num_experts")
    if not experts or not _is_sparse(fields, layer):
        return matrices * hidden * int(_get(fields, "intermediate_size") or 4 * hidden)
    width = _get(fields, "moe_intermediate_size") or _number(fields, "intermediate_size")
    shared = _get(fields, "shared_expert_intermediate_size") or (_get(fields, "n_shared_experts") or 0) * width
    return int(matrices * hidden * (_number(fields, "num_experts_per_tok") * width + shared) + hidden * experts)


def _is_sparse(fields: Mapping[str, Any], layer: int) -> bool:
    dense = layer < (_get(fields, "first_k_dense_replace") or 0) or layer in (_get(fields, "mlp_only_layers") or ())
    return not dense and (layer + 1) % (_get(fields, "decoder_sparse_step") or 1) == 0


def _window(fields: Mapping[str, Any], layer: int) -> int:
    """Return a layer's sliding window, 0 for none."""
    window = int(_get(fields, "sliding_window") or 0)
    kinds = _get(fields, "layer_types")
    if kinds is None:
        if fields.get("use_sliding_window") is False or layer < (_get(fields, "max_window_layers") or 0):
            return 0
        return window
    sizes = {"full_attention": 0, "sliding_attention": window}
    sizes["chunked_attention"] = int(_get(fields, "attention_chunk_size") or 0)
    if kinds[layer] not in sizes:
        raise ValueError(f"layer {layer} is {kinds[layer]!r}; FLOPs are known for {', '.join(sizes)}")
    return sizes[kinds[layer]]
