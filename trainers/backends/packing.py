"""Samples packed into one row: positions start anew in each, and attention is block-diagonal and causal.

On a GPU in half precision a kernel for sequences of varying lengths does this, and its cost is the sum over samples.
Elsewhere a mask over the whole row gives the same result and costs the square of the row's length. `alike` tries
whether the other layers of a model keep samples apart as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from asyncrl.engine.errors import ConfigError

VARLEN = "asyncrl_varlen"
_HALF = (torch.bfloat16, torch.float16)
# The kernel reads grouped heads as they are, if it is told so. Before torch had the option, each head needs its own.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a row of T tokens divides into samples of these lengths."""

    lengths: Sequence[int]

    def split(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut a tensor over the row, (T, …), into samples."""
        return torch.split(row, list(self.lengths))

    def arguments(self, device: torch.device, dtype: torch.dtype, *, windows: bool = False) -> dict[str, Any]:
        """Return what a transformers model takes beside the ids: positions (1, T), and a mask or samples' bounds.

        With `windows` there is no mask, because one mask would apply to every layer, whatever its window. transformers
        then makes one mask per kind of layer, from the positions that start anew.
        """
        positions = moved(self._positions(), device)
        if has_varlen(device, dtype):
            return {"position_ids": positions, **self._bounds(device)}
        if windows:
            return {"position_ids": positions}
        lengths = torch.tensor(self.lengths, device=device)
        sample = torch.repeat_interleave(torch.arange(len(self.lengths), device=device), lengths)
        attends = (sample.unsqueeze(1) == sample.unsqueeze(0)).tril()
        mask = torch.zeros(attends.shape, dtype=dtype, device=device).masked_fill(~attends, torch.finfo(dtype).min)
        return {"position_ids": positions, "attention_mask": mask[None, None]}

    def _positions(self) -> torch.Tensor:
        """Return (1, T) on the CPU, for one copy: on a GPU each sample's own would take a kernel."""
        lengths = torch.tensor(self.lengths)
        before = lengths.cumsum(0) - lengths
        return (torch.arange(sum(self.lengths)) - torch.repeat_interleave(before, lengths)).unsqueeze(0)

    def _bounds(self, device: torch.device) -> dict[str, Any]:
        """Return the bounds under the names that transformers and its flash attention use."""
        bounds = moved(torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32), device)
        longest = max(self.lengths)
        return {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to a device; to a GPU from pinned memory, so that the CPU need not wait."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packed rows go through a kernel for varying lengths."""
    return device.type == "cuda" and dtype in _HALF


def has_windows(model: Any) -> bool:
    """Return whether a layer of a transformers model attends only within a window or a chunk."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(window or kinds - {"full_attention"})


def use_varlen(model: Any) -> None:
    """Make a transformers model attend within the bounds of samples, where a forward pass brings them."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen_attention)
    model.set_attn_implementation(VARLEN)


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sample: (1, heads, T, size) to (1, T, heads, size); grouped heads share keys.

    Without bounds rows are samples, (B, heads, L, size) to (B, L, heads, size), by torch's kernel for such.

    A sliding window of w lets a position attend to itself and w - 1 before it. Under autocast, which
    leaves rotated queries and keys in float32, all three are brought to its type. ConfigError
    for logits that are capped, or attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise ConfigError(f"{type(module).__name__} caps its logits or has sinks; set trainer.packed to false")
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)  # type: ignore[no-any-return]
    half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    q, k, v = (tensor[0].transpose(0, 1).to(half) for tensor in (query, key, value))
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and not _GROUPED:
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    window = (sliding_window - 1 if sliding_window else -1, 0)
    bounds, longest = cu_seq_lens_q, max_length_q
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **_GROUPED)
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None
