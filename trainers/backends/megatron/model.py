"""A part of a replica as megatron's GPTModel: a stage's layers, and of each matrix a tensor rank's part."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from asyncrl.trainers.backends.layout import Layout
from asyncrl.trainers.backends.megatron.architecture import padded_vocabulary
from asyncrl.trainers.backends.megatron.attention import CoreAttention
from asyncrl.trainers.backends.megatron.given_experts import give_experts
from asyncrl.trainers.backends.megatron.settings import MegatronSettings
from asyncrl.trainers.backends.packing import moved


@dataclass(frozen=True, slots=True)
class Inputs:
    """A pass's ids (rows, L), the position of each place in its sample (L), and the bounds of packed samples.

    `experts` (L times rows, layers, k) are the choices that routers replay; None: they choose by themselves.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    bounds: PackedSeqParams | None
    experts: torch.Tensor | None

    @classmethod
    def of(cls, layout: Layout, experts: torch.Tensor | None, device: torch.device) -> "Inputs":
        """Move what a layout holds to a device; `experts` (rows times L, layers, k) are in the layout's order."""
        ids = moved(layout.ids, device)
        if experts is not None:
            # megatron has positions first, and rows second.
            experts = moved(experts.view(*ids.shape, *experts.shape[1:]).transpose(0, 1).flatten(0, 1), device)
        if layout.packing is None:
            return cls(ids, torch.arange(ids.shape[1], device=device), None, experts)
        lengths = torch.tensor(layout.packing.lengths)
        ends = lengths.cumsum(0)
        positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
        bounds = moved(torch.cat([torch.zeros(1, dtype=torch.long), ends]).to(torch.int32), device)
        longest = max(layout.packing.lengths)
        packed = PackedSeqParams("sbhd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
        return cls(ids, moved(positions, device), packed, experts)


class Model(GPTModel):
    """Its forward pass ends with hidden states (positions, rows, width), and `logits` has the output head's turn.

    Rotary positions come per place: megatron's own loop over the samples of a packed row.
    """

    def __init__(self, config: Any, settings: MegatronSettings, *, megatron_config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        experts = megatron_config.num_moe_experts
        spec = get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=megatron_config.qk_layernorm, normalization="RMSNorm"
        )
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
        super().__init__(
            config=megatron_config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocabulary(config, settings.split),
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type="none",
        )
        self.real_vocabulary = int(config.vocab_size)
        # The formula of these families is one, and that of their scaled positions too.
        self._frequencies = LlamaRotaryEmbedding(config).inv_freq.float()
        self._given = give_experts(self, recomputes=settings.recompute) if settings.router_replay else {}

    def forget_experts(self) -> None:
        """Keep none of the choices of a pass that an error has ended."""
        for given in self._given.values():
            given.forget()

    def forward(self, inputs: Inputs) -> torch.Tensor:
        for layer, given in self._given.items():
            given.take(None if inputs.experts is None else inputs.experts[:, layer])
        hidden = self.embedding(input_ids=inputs.ids, position_ids=None) if self.pre_process else None
        angles = torch.outer(inputs.positions.float(), self._frequencies.to(inputs.positions.device))
        found: torch.Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None],
            packed_seq_params=inputs.bounds,
        )
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (N, this rank's part of the padded vocabulary) of hidden states (N, width), on the last stage."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        found, _none = self.output_layer(hidden.unsqueeze(1), weight=weight)
        return found.squeeze(1)  # type: ignore[no-any-return]
