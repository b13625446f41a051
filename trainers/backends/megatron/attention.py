"""Attention for megatron without Transformer Engine, within the samples of padded or packed rows.

megatron's own keeps a table of heads times positions squared, and refuses packed rows.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.trainers.backends.packing import has_varlen, varlen_attention


class CoreAttention(MegatronModule):
    """Causal attention from (positions, rows, heads, size) to (positions, rows, heads times size).

    Packed samples come as one row in megatron's format `sbhd`, which it then treats as any row, with their bounds
    beside it. On a GPU in half precision a kernel for varying lengths serves them.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        if packed_seq_params is None:
            found = self._causal(q, k, v)
        elif has_varlen(q.device, q.dtype):
            bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            found, _none = varlen_attention(
                self, q, k, v, None, cu_seq_lens_q=bounds, max_length_q=longest, scaling=self._scale
            )
            found = found.transpose(1, 2)
        else:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            samples = zip(*(torch.split(one, lengths, dim=2) for one in (q, k, v)), strict=True)
            found = torch.cat([self._causal(*sample) for sample in samples], dim=2)
        return found.permute(2, 0, 1, 3).flatten(2)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
