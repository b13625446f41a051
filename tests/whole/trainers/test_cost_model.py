"""FLOPs of configurations worked out by hand; the fit of seconds to them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.trainers.cost.model import PASSES, CostModel

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 50,
}


def forward(config: Any, tokens: int) -> float:
    return float(CostModel.of(config).flops(np.array([tokens]))[0]) / PASSES


def brute_pairs(tokens: int, window: int | None = None) -> int:
    """Count the pairs (query, key) that attend, one by one."""
    return sum(1 for q in range(tokens) for k in range(q + 1) if window is None or q - k < window)


def test_a_llama_costs_what_its_matrices_say() -> None:
    """Per layer: q, k, v, o of 8x8 each; gate, up, down of 8x20; head 8x50; 4 heads of 2 in scores and in values."""
    per_token = 2 * (2 * (4 * 8 * 8 + 3 * 8 * 20) + 8 * 50)
    assert forward(LLAMA, 1) == per_token + 2 * 2 * (2 * 4 * 2) * 1
    assert forward(LLAMA, 7) == 7 * per_token + 2 * 2 * (2 * 4 * 2) * brute_pairs(7)


def test_training_costs_three_forwards() -> None:
    linear, pair = 1000.0, 10.0
    assert CostModel(linear, ((0, pair),)).flops(np.array([4])).tolist() == [3 * (4 * linear + 10 * pair)]


def test_grouped_queries_share_keys_and_values() -> None:
    """One key-value head of 2: k and v are 8x2 each; scores and values stay those of 4 heads."""
    saved = 2 * 2 * (2 * 8 * 8 - 2 * 8 * 2)
    assert forward(LLAMA, 5) - forward(LLAMA | {"num_key_value_heads": 1}, 5) == 5 * saved


def test_a_head_may_be_wider_than_its_share_of_the_model() -> None:
    """Heads of 6: q and o are 8x24; k and v, of 2 heads, 8x12."""
    config = LLAMA | {"head_dim": 6, "num_key_value_heads": 2}
    per_token = 2 * (2 * (2 * 8 * 24 + 2 * 8 * 12 + 3 * 8 * 20) + 8 * 50)
    assert forward(config, 3) == 3 * per_token + 2 * 2 * (2 * 4 * 6) * brute_pairs(3)


def test_only_active_and_shared_experts_and_the_router_cost() -> None:
    """2 of 16 experts of width 6, one shared of width 10, a router 8x16; layer 0 is dense."""
    config = LLAMA | {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10,
        "mlp_only_layers": [0],
    }
    dense, sparse = 3 * 8 * 20, 3 * 8 * (2 * 6 + 10) + 8 * 16
    per_token = 2 * (2 * 4 * 8 * 8 + dense + sparse + 8 * 50)
    assert forward(config, 4) == 4 * per_token + 2 * 2 * 16 * brute_pairs(4)


def test_mixtral_and_deepseek_name_their_experts_otherwise() -> None:
    mixtral = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    per_token = 2 * (2 * (4 * 8 * 8 + 3 * 8 * 40 + 8 * 4) + 8 * 50)
    assert forward(mixtral, 2) == 2 * per_token + 2 * 2 * 16 * 3
    sparse_every_second = LLAMA | {"num_experts": 4, "num_experts_per_tok": 1, "decoder_sparse_step": 2}
    assert forward(LLAMA, 2) + 2 * 2 * 8 * 4 == forward(sparse_every_second, 2)
    routed = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1}
    deepseek = LLAMA | routed | {"first_k_dense_replace": 1}
    per_token = 2 * (2 * 4 * 8 * 8 + 3 * 8 * 20 + 3 * 8 * 6 * 3 + 8 * 8 + 8 * 50)
    assert forward(deepseek, 2) == 2 * per_token + 2 * 2 * 16 * 3


def test_latent_attention_goes_down_and_up_again() -> None:
    """Ranks 3 (keys and values) and 5 (queries); 4 heads of 2 content + 1 rotary, values of 2."""
    latent = {"kv_lora_rank": 3, "q_lora_rank": 5, "qk_rope_head_dim": 1, "qk_nope_head_dim": 2, "v_head_dim": 2}
    projections = 8 * 5 + 5 * 4 * 3 + 8 * (3 + 1) + 3 * 4 * (2 + 2) + 4 * 2 * 8
    per_token = 2 * (2 * (projections + 3 * 8 * 20) + 8 * 50)
    assert forward(LLAMA | latent, 3) == 3 * per_token + 2 * 2 * 4 * (3 + 2) * brute_pairs(3)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 11])
def test_windows_bound_what_a_position_attends_to(tokens: int) -> None:
    """A window of 4 in every layer; then in the second alone, by three ways to say so."""
    base = forward(LLAMA, tokens) - 2 * 2 * 16 * brute_pairs(tokens)
    everywhere = LLAMA | {"sliding_window": 4}
    assert forward(everywhere, tokens) == base + 2 * 2 * 16 * brute_pairs(tokens, 4)
    mixed = base + 2 * 16 * (brute_pairs(tokens) + brute_pairs(tokens, 4))
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    assert forward(everywhere | kinds, tokens) == mixed
    assert forward(everywhere | {"use_sliding_window": True, "max_window_layers": 1}, tokens) == mixed
    chunked = {"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 4}
    assert forward(LLAMA | chunked, tokens) == mixed


def test_a_window_that_is_switched_off_bounds_nothing() -> None:
    assert forward(LLAMA | {"sliding_window": 4, "use_sliding_window": False}, 9) == forward(LLAMA, 9)


def test_ungated_layers_have_two_matrices_and_old_names() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 4, "n_inner": None, "vocab_size": 50}
    per_token = 2 * (2 * (4 * 8 * 8 + 2 * 8 * 32) + 8 * 50)
    assert forward(gpt2, 3) == 3 * per_token + 2 * 2 * 16 * 6


def test_objects_and_nested_text_configurations_are_read() -> None:
    config = SimpleNamespace(to_dict=lambda: {"text_config": LLAMA, "vision_config": {"hidden_size": 99}})
    assert forward(config, 6) == forward(LLAMA, 6)


def test_a_configuration_that_lacks_something_is_refused() -> None:
    with pytest.raises(ValueError, match="no num_hidden_layers"):
        CostModel.of({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"})
    with pytest.raises(ValueError, match="layer 0 is 'linear_attention'"):
        CostModel.of(LLAMA | {"layer_types": ["linear_attention", "full_attention"]})
