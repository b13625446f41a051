"""An adapter on models of several kinds: where it goes, what is merged of it, and that peft loads what is saved."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from asyncrl.configs import load_config
from asyncrl.configs.sections.lora import Lora
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.causal_lm import outline_model
from asyncrl.engine.model.checkpoint import load_checkpoint
from asyncrl.engine.model.folder import Note
from asyncrl.engine.model.lora import add_adapter, choose_layers, merged_state
from asyncrl.engine.model.writer import ModelWriter

NOTE = Note(version=3, step=3, mean_reward=0.5, reward_window=10, config="0")
SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
MODELS = {
    "tied": transformers.Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "experts": transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=2),
    "transposed": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, eos_token_id=1),
}
LORA = Lora(rank=3, alpha=5.0, target_modules="auto")
IDS = torch.tensor([[2, 5, 7, 3, 1]])


def model_of(kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(MODELS[kind]).eval()


def trained(model: Any, lora: Lora = LORA) -> Any:
    """A model with an adapter whose matrices are not zero."""
    adapted = add_adapter(model, lora, seed=0)
    random = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.rand(parameter.shape, generator=random, dtype=parameter.dtype) / 10)
    return adapted


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_are_the_models_own_in_name_and_shape_and_compute_the_same(kind: str) -> None:
    # torch has no grouped product of experts in float64.
    dtype, rounding = (torch.float32, 1e-5) if kind == "experts" else (torch.float64, 1e-12)
    plain = model_of(kind).to(dtype)
    adapted = trained(copy.deepcopy(plain))
    expected = logits(adapted)
    merged = merged_state(adapted, dtype)
    assert [(name, value.shape) for name, value in merged.items()] == [
        (name, value.shape) for name, value in plain.state_dict().items()
    ]
    assert (expected - logits(plain)).abs().max() > 1e-3
    other = copy.deepcopy(plain)
    other.load_state_dict(merged)
    torch.testing.assert_close(logits(other), expected, rtol=0, atol=rounding)
    assert torch.equal(logits(adapted), expected), "merging must not write to the model"


def test_a_new_adapter_changes_nothing_and_is_the_same_everywhere() -> None:
    plain = model_of("tied")
    before = torch.get_rng_state()
    first, second = (add_adapter(copy.deepcopy(plain), LORA, seed=3).state_dict() for _ in range(2))
    other = add_adapter(copy.deepcopy(plain), LORA, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert not all(torch.equal(first[name], value) for name, value in other.state_dict().items())
    assert torch.equal(logits(other), logits(plain))


@pytest.mark.parametrize(
    ("kind", "wanted", "message"),
    [
        ("tied", ["q_proj", "qproj"], "'qproj', by which no layer's name ends; the linear layers of this Qwen2For"),
        ("experts", ["experts"], "'experts', which is a MixtralExperts, not a linear layer; .* q_proj, k_proj, v_proj"),
        ("experts", ["w1"], "'w1', by which no layer's name ends"),
        ("tied", ["lm_head"], "'lm_head', which shares its weight with the input embedding"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused_by_name(
    save_checkpoint: Callable[..., Path], kind: str, wanted: list[str], message: str
) -> None:
    """The same is said of the outline, before anything starts, as of the model itself."""
    model = load_config("default", {"model.path": str(save_checkpoint(MODELS[kind]))}).model
    for one in (outline_model(model, vocab_size=40), model_of(kind)):
        with pytest.raises(ConfigError, match=message):
            choose_layers(one, wanted)


def test_auto_is_every_linear_layer_but_the_head() -> None:
    names = choose_layers(model_of("experts"), "auto")
    assert len(names) == 2 * 4
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert choose_layers(model_of("experts"), ["lm_head", "1.self_attn.q_proj"]) == [
        "model.layers.1.self_attn.q_proj",
        "lm_head",
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_peft_loads_a_saved_adapter_bit_for_bit(
    save_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    path = save_checkpoint(MODELS[kind])
    config = load_config("default", {"model.path": str(path)}).model
    adapted = trained(load_checkpoint(str(path)))
    writer = ModelWriter(config, adapted, vocab_size=40)
    state = {name: value.clone() for name, value in merged_state(adapted, torch.float32).items()}
    expected = logits(adapted)
    writer.hold_adapter()
    for parameter in adapted.parameters():  # Training goes on.
        parameter.data.zero_()
    writer.write(state, [tmp_path / "out" / "model", tmp_path / "out" / "model-best"], NOTE)

    for name in ("adapter", "adapter-best"):
        loaded = PeftModel.from_pretrained(load_checkpoint(str(path)), str(tmp_path / "out" / name)).eval()
        assert torch.equal(logits(loaded), expected)
    torch.testing.assert_close(logits(load_checkpoint(str(tmp_path / "out" / "model"))), expected, rtol=0, atol=1e-5)
    note = replace(NOTE, source=str(path), lora_rank=3)
    assert Note.read(tmp_path / "out" / "model") == Note.read(tmp_path / "out" / "adapter") == note
    said = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (3, 5, str(path))


def test_options_of_an_adapter_without_a_rank_are_refused() -> None:
    for options in ({"lora.alpha": 16.0}, {"lora.target_modules": ["q_proj"]}):
        with pytest.raises(ConfigError, match=r"and lora\.rank null, by which all weights are trained"):
            load_config("default", options)
