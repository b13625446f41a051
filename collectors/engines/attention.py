"""Attention over slots of different lengths: one function for transformers' models, and its explicit masks.

transformers calls `attend` in place of its own attention. A model's masks are additive: 0 where a token sees a
position, and the type's lowest number where it does not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.engine.errors import ConfigError

NAME = "asyncrl_slots"
_FULL, _SLIDING = "full_attention", "sliding_attention"
Masks = torch.Tensor | Mapping[str, torch.Tensor]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` (B, heads, L, width) to `key`, `value` (B, key heads, T, width); return (B, L, heads, width).

    One token per row takes the heads that share a key as its queries, so that no key is copied for them.
    """
    rows, heads, length, _width = query.shape
    shared = heads // key.shape[1]
    packed = length == 1 and attention_mask is not None
    if packed:
        query = query.view(rows, key.shape[1], shared, -1)
    elif shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    if softcap is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=attention_mask is None and length > 1
        )
    else:
        out = _capped(query, key, value, attention_mask, scaling, softcap)
    return out.reshape(rows, heads, length, -1).transpose(1, 2).contiguous(), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attend with scores bounded by a hyperbolic tangent (Gemma 2), which torch's own kernels do not know."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = causal_mask(query.shape[-2], None, scores.dtype, scores.device)
    return torch.softmax((scores + mask).float(), dim=-1).to(value.dtype) @ value


def use_slots(model: Any) -> None:
    """Have a transformers model attend by `attend` from now on; without a mask, whole sequences are causal still."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the mask (1, 1, length, length) of whole sequences; a token sees `window` positions, its own included."""
    at = torch.arange(length, device=device)
    return _additive(at[None, :], at[:, None], window, dtype)[None, None]


def _additive(positions: torch.Tensor, own: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    hidden = positions > own
    if window is not None:
        hidden = hidden | (positions <= own - window)
    return torch.zeros((), dtype=dtype, device=own.device).masked_fill(hidden, torch.finfo(dtype).min)


class MaskPlan:
    """Which masks a model takes: one for all layers, or one per kind of layer, each with its window or none."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
        window = getattr(text, "sliding_window", None)
        strange = [kind for kind in kinds if kind not in {_FULL, _SLIDING}]
        if strange:
            raise ConfigError(
                f"{text.model_type} has layers of {', '.join(strange)}; the native engine runs models whose layers are "
                f"{_FULL} or {_SLIDING}"
            )
        self._windows = {kind: window if kind == _SLIDING else None for kind in kinds}
        self._one = window if not kinds else None
        # A model whose layers are all alike takes the mask itself; only mixed ones look kinds up.
        self._by_kind = _SLIDING in kinds

    def whole(self, length: int, dtype: torch.dtype, device: torch.device) -> Masks:
        """Return masks of whole sequences from position 0."""
        if not self._by_kind:
            return causal_mask(length, self._one, dtype, device)
        return {kind: causal_mask(length, window, dtype, device) for kind, window in self._windows.items()}

    def token(self, positions: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> Masks:
        """Return masks (rows, 1, 1, columns) of one token per row, at `positions` (rows,), over cached `columns`."""
        own = positions[:, None]
        if not self._by_kind:
            return _additive(columns[None, :], own, self._one, dtype)[:, None, None]
        return {
            kind: _additive(columns[None, :], own, window, dtype)[:, None, None]
            for kind, window in self._windows.items()
        }
