"""Which boxes of a transformers model's weights each of a rank's megatron weights consists of.

| megatron                         | transformers                          | of a tensor rank                  |
|----------------------------------|---------------------------------------|-----------------------------------|
| word_embeddings, output_layer    | embed_tokens, lm_head                 | rows                              |
| linear_qkv (weight, bias)        | q_proj, k_proj, v_proj                | per group: its queries, key, value |
| linear_proj                      | o_proj                                | columns                           |
| linear_fc1                       | gate_proj, up_proj                    | rows of the one, then of the other |
| linear_fc2                       | down_proj                             | columns                           |
| local_experts.N.linear_fc1 (fc2) | experts.gate_up_proj[e] (down_proj)   | all, of its experts               |
| norms, router                    | the same                              | all                               |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from asyncrl.trainers.backends.megatron.architecture import head_size

Box = tuple[int | slice, ...]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_ALL: Box = (slice(None),)


@dataclass(frozen=True, slots=True)
class Part:
    """The box `there` of the tensor `name` is the box `here` of a weight. `counted`: no other rank has it for all."""

    name: str
    there: Box
    here: Box
    counted: bool = True


class PartsOf:
    """Names the parts of a rank's weights, for the rank that this process is."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._ranks = parallel_state.get_tensor_model_parallel_world_size()

    def of(self, name: str, parameter: torch.Tensor, layer_number: int | None) -> list[Part]:
        """Return the parts of a weight by megatron's name; a layer's number is from 0, in the whole model."""
        found = _LAYER.fullmatch(name)
        if found:
            return list(self._of_layer(f"model.layers.{layer_number}.", found[2], parameter))
        first = self._rank == 0
        if name == "decoder.final_layernorm.weight":
            return [Part("model.norm.weight", _ALL, _ALL, first)]
        tied = self._config.tie_word_embeddings
        embedding = name == "embedding.word_embeddings.weight"
        rows = parameter.shape[0]
        there = slice(self._rank * rows, min((self._rank + 1) * rows, self._config.vocab_size))
        here = slice(0, max(0, there.stop - there.start))
        # Of tied weights the last stage has a copy of the first one's.
        counted = embedding or not tied or parallel_state.is_pipeline_first_stage()
        name = "model.embed_tokens.weight" if embedding or tied else "lm_head.weight"
        return [Part(name, (there,), (here,), counted)] if here.stop else []

    def _of_layer(self, prefix: str, name: str, parameter: torch.Tensor) -> Iterator[Part]:
        if name in _WHOLE:
            yield Part(prefix + _WHOLE[name], _ALL, _ALL, self._rank == 0)
        elif name.startswith("self_attention.linear_qkv."):
            yield from self._attention_in(f"{prefix}self_attn.", name.rpartition(".")[2])
        elif name == "self_attention.linear_proj.weight":
            yield self._columns(f"{prefix}self_attn.o_proj.weight", parameter)
        elif name == "mlp.linear_fc1.weight":
            half = parameter.shape[0] // 2
            there = slice(self._rank * half, (self._rank + 1) * half)
            yield Part(f"{prefix}mlp.gate_proj.weight", (there,), (slice(0, half),))
            yield Part(f"{prefix}mlp.up_proj.weight", (there,), (slice(half, 2 * half),))
        elif name == "mlp.linear_fc2.weight":
            yield self._columns(f"{prefix}mlp.down_proj.weight", parameter)
        else:
            expert = _EXPERT.fullmatch(name)
            if not expert:
                raise AssertionError(f"no weight of transformers is {prefix}{name}")
            of_rank = self._config.num_experts // parallel_state.get_expert_model_parallel_world_size()
            number = parallel_state.get_expert_model_parallel_rank() * of_rank + int(expert[1])
            yield Part(f"{prefix}mlp.experts." + ("gate_up_proj" if expert[2] == "1" else "down_proj"), (number,), _ALL)

    def _attention_in(self, prefix: str, kind: str) -> Iterator[Part]:
        config, size = self._config, head_size(self._config)
        groups = config.num_key_value_heads // self._ranks
        queries = config.num_attention_heads // config.num_key_value_heads * size
        at = 0
        for group in range(self._rank * groups, (self._rank + 1) * groups):
            for name, rows in (("q_proj", queries), ("k_proj", size), ("v_proj", size)):
                yield Part(
                    f"{prefix}{name}.{kind}", (slice(group * rows, (group + 1) * rows),), (slice(at, at + rows),)
                )
                at += rows

    def _columns(self, name: str, parameter: torch.Tensor) -> Part:
        width = parameter.shape[1]
        return Part(name, (slice(None), slice(self._rank * width, (self._rank + 1) * width)), _ALL)
