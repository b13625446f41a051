"""Samples of one micro-batch, packed or padded, against each alone, for layers of many kinds."""

from typing import Any

import pytest
import torch
import transformers

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.causal_lm import token_logprobs
from asyncrl.engine.model.sketch import sketch_model
from asyncrl.trainers.backends.alike import Alike
from asyncrl.trainers.backends.base import Rows

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FULL_AND_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def sketch(kind: str, **changes: Any) -> Any:
    model = sketch_model(getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes}))
    assert model is not None
    return model


ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 4}),
    "window_in_one_layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "capped": ("Gemma2", {**FULL_AND_LOCAL, "head_dim": 8}),
    "two_rotations": ("Gemma3Text", {**FULL_AND_LOCAL, "head_dim": 8}),
    "chunks": ("Llama4Text", {"attention_chunk_size": 4, "head_dim": 8, "num_local_experts": 2}),
    "local": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
    "absolute": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "learned": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
}
UNLIKE: dict[str, tuple[str, dict[str, Any], str]] = {
    "convolution": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, r"a Lfm2ShortConv in a layer of conv"),
    "linear": (
        "Qwen3Next",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, **LINEAR, **EXPERTS},
        r"a Qwen3NextGatedDeltaNet in a layer of linear_attention",
    ),
    "state_space": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}, r"a Mamba2Mixer"),
    "alibi": ("Bloom", {"n_layer": 2, "n_head": 4}, r"BloomForCausalLM as each alone: it fails on them"),
}


@pytest.mark.parametrize(("kind", "packed"), [*((kind, True) for kind in ALIKE), ("llama", False), ("window", False)])
def test_samples_of_a_micro_batch_are_computed_as_each_alone(kind: str, packed: bool, make_backend: Any) -> None:
    """FOUND-L1: log-probabilities and gradients to a millionth, beyond the window and next to another sample."""
    name, changes = ALIKE[kind]
    model = sketch(name, **changes)
    ids = [torch.arange(2, 13), torch.arange(17, 3, -1), torch.tensor([5, 9])]
    alone = [token_logprobs(model(input_ids=row[None]).logits[0, :-1], row[1:], 1.0) for row in ids]
    backend = make_backend(model, packed=packed)
    torch.autograd.backward(torch.stack([-row.sum() for row in alone]).sum())
    expected = backend.gradients()
    rows = Rows(ids, [], [1] * 3, [], [], filler=False)
    for found, right in zip(backend.logprobs(rows), alone, strict=True):
        torch.testing.assert_close(found, right.detach(), rtol=1e-6, atol=4e-6)
    backend.accumulate_supervised(ids, [1] * 3, 1)
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(backend.gradients(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("kind", "align"), [*((kind, 1) for kind in UNLIKE), ("convolution", 4)])
def test_layers_that_mix_packed_samples_are_refused_by_name(kind: str, align: int, make_backend: Any) -> None:
    """FOUND-L1, FOUND-I14: short convolutions, linear attention, state spaces; ALiBi, whose code wants a plain mask."""
    name, changes, named = UNLIKE[kind]
    model = sketch(name, **changes)
    alike = Alike(model, temperature=1.0)
    with pytest.raises(ConfigError, match=named) as refused:
        alike.check(make_backend(model, packed=True, align=align), packed=True, align=align, dtype=torch.float32)
    assert "Set trainer.packed to false" in str(refused.value)
    Alike(model, temperature=1.0).check(make_backend(model), packed=False, dtype=torch.float32)


def test_a_backend_of_another_temperature_is_not_alike(make_backend: Any) -> None:
    """The comparison sees what moves log-probabilities, whatever it is."""
    model = sketch("Llama")
    with pytest.raises(ConfigError, match=r"padded samples must be to LlamaForCausalLM as each alone"):
        Alike(model, temperature=1.0).check(make_backend(model, temperature=1.2), packed=False, dtype=torch.float32)


def test_a_large_models_sketch_has_a_layer_of_each_kind_and_short_windows() -> None:
    model = sketch_model(transformers.Gemma2Config())
    assert model is not None
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert (model.config.sliding_window, model.config.vocab_size) == (4, 64)
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000
