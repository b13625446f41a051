"""Models and splits that the Megatron backend refuses by name, which needs no megatron."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from asyncrl.engine.errors import ConfigError
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.megatron.architecture import check_model, check_split, padded_vocabulary
from asyncrl.trainers.backends.megatron.pieces import in_pieces
from asyncrl.trainers.backends.megatron.settings import Split

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPT2Config(), "no model of type 'gpt2'"),
        (LlamaConfig(attention_bias=True), "attention_bias False.* has True"),
        (LlamaConfig(mlp_bias=True), "mlp_bias False"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'silu'.*'gelu'"),
        (LlamaConfig(rope_parameters=YARN), "rotary positions of type default, linear, llama3; .*'yarn'"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers \[\]"),
        (Qwen3MoeConfig(decoder_sparse_step=2), "decoder_sparse_step 1"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_model(config)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3MoeConfig()], ids=lambda one: one.model_type)
def test_models_of_the_families_are_taken(config: Any) -> None:
    check_model(config)


@pytest.mark.parametrize(
    ("config", "split", "ranks", "says"),
    [
        (
            LlamaConfig(**SMALL),
            Split(tensor=2, pipeline=2),
            6,
            r"tensor_parallel \* pipeline_parallel is 4, .*ranks: 6",
        ),
        (LlamaConfig(**SMALL), Split(tensor=4), 4, "tensor_parallel is 4, which must divide key and value heads: 2"),
        (LlamaConfig(**SMALL), Split(pipeline=4), 4, "pipeline_parallel is 4, which must divide layers: 6"),
        (LlamaConfig(**SMALL), Split(expert=2), 2, "expert_parallel is 2; the model has no experts"),
        (
            Qwen3MoeConfig(**SMALL, num_experts=6),
            Split(expert=4),
            4,
            "expert_parallel is 4, which must divide experts: 6",
        ),
        (Qwen3MoeConfig(**SMALL, num_experts=6), Split(expert=3), 4, "must divide the data parallel ranks: 4"),
        (Qwen3MoeConfig(**SMALL), Split(tensor=2), 2, "sequence parallelism"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(config: Any, split: Split, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_split(config, split, ranks)


def test_a_vocabulary_is_padded_to_equal_parts() -> None:
    config = LlamaConfig(vocab_size=12)
    assert [padded_vocabulary(config, Split(tensor=parts)) for parts in (1, 2, 5, 8)] == [12, 12, 15, 16]


def test_pieces_of_a_micro_batch_keep_the_order_of_samples() -> None:
    tokens = [torch.full((3,), i) for i in range(5)]
    rows = Rows(tokens, (), [1, 2, 3, 4, 5], (), [0] * 5, filler=False, extras={"x": tokens}, pad_to=7)
    found = in_pieces(rows, 2)
    assert [[int(one[0]) for one in piece.tokens] for piece in found] == [[0, 1], [2, 3, 4]]
    assert [list(piece.prompt_tokens) for piece in found] == [[1, 2], [3, 4, 5]]
    assert [len(piece.extras["x"]) for piece in found] == [2, 3]
    assert {piece.pad_to for piece in found} == {7}
    assert len(in_pieces(rows, 9)) == 5
