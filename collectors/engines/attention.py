"""Attention over slots of different lengths: one function for transformers' models, and its explicit masks.

transformers calls `attend` in place of its own attention. A model's masks are additive: 0 where a token sees a
position, and the type's lowest number where it does not.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.collectors.engines.slot_cache import SlotCache
from asyncrl.engine.errors import ConfigError

NAME = "asyncrl_slots"
# A compiled program knows its cache by number: an operation takes tensors and plain values alone.
_CACHES: WeakValueDictionary[int, SlotCache] = WeakValueDictionary()
_NUMBERS = count()
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

    A layer of a compiled step attends to its slots, whose newest token `key` and `value` (T = 1) are.
    """
    length = query.shape[2]
    if torch.compiler.is_compiling() and attention_mask is not None:
        number, layer = module.slot_cache_number, module.layer_idx
        return slot_attention(query, key, value, attention_mask, number, layer, scaling, softcap), None
    if length == 1 and attention_mask is not None:
        return _one_token(query, key, value, attention_mask, scaling, softcap), None
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    out = _attention(query, key, value, attention_mask, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from one token per row; the heads that share a key are its queries, so that no key is copied for them."""
    rows, heads, _length, width = query.shape
    query = query.view(rows, key.shape[1], heads // key.shape[1], width)
    # A compiled step's mask is as long as a slot, whatever its window.
    out = _attention(query, key, value, mask[..., : key.shape[2]], scaling, softcap)
    return out.reshape(rows, 1, heads, -1)


def _in_slots(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    number: int,
    layer: int,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write one token per row to cache `number`, and attend from it to its slot; return (rows, 1, heads, width)."""
    keys, values = _CACHES[number].append(layer, key, value)
    return _one_token(query, keys, values, mask, scaling, softcap)


slot_attention = torch.library.custom_op("asyncrl::slot_attention", _in_slots, mutates_args=())
"""`_in_slots` as one operation that torch.compile does not look into: one program then serves every window, while the
cache, which the program does not see, is written and read in the order of the layers."""


@slot_attention.register_fake
def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is not None:
        return _capped(query, key, value, mask, scaling, softcap)
    causal = mask is None and query.shape[2] > 1
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=causal)


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


def decode_in(model: Any, cache: SlotCache) -> None:
    """Have the layers of a model's compiled steps attend to the slots of `cache`."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.slot_cache_number = number


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
