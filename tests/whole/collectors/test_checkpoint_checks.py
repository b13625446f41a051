"""What a checkpoint folder must hold, and what of its settings a run takes over."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from asyncrl.collectors.engines.stop_text import completing
from asyncrl.collectors.tasks import load_task
from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.checks import check_checkpoint
from asyncrl.engine.lifecycle.parts import build_run_model, run_tokenizer, stop_ids, tokenized
from asyncrl.engine.model import checkpoint as checkpoints
from asyncrl.engine.model.settings import sampling_settings
from asyncrl.engine.records import Prompt

PROMPTS = [Prompt(id=7, text="12>", answer="12", dataset="d"), Prompt(id=8, text="3>", answer="3", dataset="d")]


def tiny(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    return LlamaConfig(**{**sizes, **heads, **ids, **changes})


def run_config(path: Path, **values: Any) -> RunConfig:
    overrides = [Override(name.replace("__", "."), value, "test") for name, value in values.items()]
    return load("default", [Override("model.path", str(path), "test"), *overrides]).config


def set_json(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**found, **values}), encoding="utf-8")


def without(folder: Path, *names: str, **added: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if name not in names}
    save_file({**kept, **added}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("limit", [None, 0])
def test_a_checkpoint_that_lacks_its_output_layer_is_refused(
    save_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """FOUND-L7: also where it is too large to be loaded before a run."""
    path = save_checkpoint(tiny())
    without(path, "lm_head.weight")
    if limit is not None:
        monkeypatch.setattr(checkpoints, "SMALL_BYTES", limit)
    with pytest.raises(ConfigError, match=r"not those of its LlamaForCausalLM: 1 missing \(lm_head\.weight\)"):
        check_checkpoint(run_config(path), PROMPTS)


def test_each_weight_that_does_not_fit_is_named(save_checkpoint: Callable[..., Path]) -> None:
    """FOUND-L7: missing, unexpected and of another shape, by the processes of a run too."""
    path = save_checkpoint(tiny())
    weights = load_file(path / "model.safetensors")
    without(
        path,
        "model.norm.weight",
        **{"model.layers.5.odd": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"][:9].clone()},
    )
    with pytest.raises(ConfigError) as refused:
        build_run_model(run_config(path))
    for words in (
        "1 missing (model.norm.weight)",
        "1 unexpected (model.layers.5.odd)",
        "1 of another shape (lm_head.weight)",
    ):
        assert words in str(refused.value)


@pytest.mark.parametrize("limit", [None, 0])
def test_tied_weights_are_not_missed(
    save_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    path = save_checkpoint(tiny(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    if limit is not None:
        monkeypatch.setattr(checkpoints, "SMALL_BYTES", limit)
    check_checkpoint(run_config(path), PROMPTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-10], r"model\.safetensors is damaged: it has \d+ bytes, and its weights need \d+"),
        (lambda data: data[:40], r"model\.safetensors is damaged: it has 40 bytes, and its header alone needs \d+"),
        (lambda data: data[:3], r"model\.safetensors is damaged"),
        (lambda data: data[:8] + b"?" * (len(data) - 8), r"its header is not that of a safetensors file"),
    ],
)
def test_a_damaged_file_is_named(
    save_checkpoint: Callable[..., Path], damage: Callable[[bytes], bytes], message: str
) -> None:
    """FOUND-L7: before anything starts, from the file's header and size."""
    path = save_checkpoint(tiny())
    file = path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(run_config(path), PROMPTS)


def test_files_that_are_not_there_are_named(save_checkpoint: Callable[..., Path]) -> None:
    path = save_checkpoint(tiny())
    set_json(path / "model.safetensors.index.json", weight_map={"a": "model-00002.safetensors"})
    with pytest.raises(ConfigError, match=r"index\.json names model-00002\.safetensors, which is not in the folder"):
        check_checkpoint(run_config(path), PROMPTS)
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        check_checkpoint(run_config(path), PROMPTS)


def test_all_end_tokens_of_a_checkpoint_and_of_the_configuration_are_taken(
    save_checkpoint: Callable[..., Path],
) -> None:
    """FOUND-L8: the tokenizer's 1, generation_config's 1 and 3, and a configured 9."""
    path = save_checkpoint(tiny())
    set_json(path / "generation_config.json", eos_token_id=[1, 3], top_p=0.9, temperature=0.6)
    config = run_config(path, rollout__stop_token_ids=[9])
    assert stop_ids(config, run_tokenizer(config)) == [1, 3, 9]
    assert sampling_settings(str(path)) == {"temperature": 0.6, "top_p": 0.9}
    check_checkpoint(config, PROMPTS)
    with pytest.raises(ConfigError, match=r"token 16 pads or ends .* rollout\.stop_token_ids.* knows tokens 0 to 15"):
        check_checkpoint(run_config(path, rollout__stop_token_ids=[16]), PROMPTS)


@pytest.mark.parametrize(("add_bos", "first"), [(None, [2]), (True, [2]), (False, [])])
def test_a_prompt_begins_as_the_tokenizer_has_it(
    save_checkpoint: Callable[..., Path], add_bos: bool | None, first: list[int]
) -> None:
    """FOUND-L8: `<s>` before a prompt, never before an answer, no `</s>` behind, and switched off openly."""
    path = save_checkpoint(tiny(), bos=True)
    tokenizer = run_tokenizer(run_config(path, rollout__add_bos=add_bos))
    assert tokenizer.encode("7>") == [*first, 11, 14]
    assert tokenized(load_task("echo", {}).examples(), tokenizer)[7] == ([*first, 11, 14, 11, 1], 2 + len(first))
    assert tokenizer.encode("<s>7>") == [2, 11, 14]  # Not twice where a text spells it out.


def test_stop_strings_are_looked_for_in_the_text_of_all_tokens(save_checkpoint: Callable[..., Path]) -> None:
    """A special token may be one; scores read a text without them."""
    tokenizer = run_tokenizer(run_config(save_checkpoint(tiny(), bos=True)))
    ids = tokenizer.encode("<s>7>")
    assert "<s>" not in tokenizer.decode(ids)
    assert completing(tokenizer.whole_text, [], ids, ("<s>",)) == 1


def test_a_first_token_that_there_is_not_cannot_be_asked_for(save_checkpoint: Callable[..., Path]) -> None:
    path = save_checkpoint(tiny())
    assert run_tokenizer(run_config(path)).encode("7") == [11]
    with pytest.raises(ConfigError, match=r"rollout\.add_bos is true, and the tokenizer of .* has no bos_token"):
        run_tokenizer(run_config(path, rollout__add_bos=True))


def test_a_prompt_that_needs_more_positions_than_there_are_is_refused(save_checkpoint: Callable[..., Path]) -> None:
    """FOUND-I15: 3 tokens and 30 new ones of 32; with 29 it fits."""
    path = save_checkpoint(tiny(max_position_embeddings=32))
    check_checkpoint(run_config(path, rollout__max_new_tokens=29), PROMPTS)
    with pytest.raises(ConfigError, match=r"prompt 7 has 3 tokens, and rollout\.max_new_tokens is 30.* 32 positions"):
        check_checkpoint(run_config(path, rollout__max_new_tokens=30), PROMPTS)


def test_more_tokens_that_end_responses_than_the_engine_takes_are_refused(save_checkpoint: Callable[..., Path]) -> None:
    """Each request would fail. The checkpoint's own, 1, counts too."""
    path = save_checkpoint(tiny(vocab_size=32))
    check_checkpoint(run_config(path, rollout__stop_token_ids=[*range(2, 17)]), PROMPTS)
    with pytest.raises(ConfigError, match=r"17 tokens end responses .*rollout\.stop_token_ids.* at most 16"):
        check_checkpoint(run_config(path, rollout__stop_token_ids=[*range(2, 18)]), PROMPTS)


def test_of_longrope_only_the_positions_of_before_it_was_stretched_are_used(
    save_checkpoint: Callable[..., Path],
) -> None:
    """A pass with one position beyond rotates all of its positions otherwise, also those of other samples."""
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    path = save_checkpoint(tiny(max_position_embeddings=128, rope_parameters=rotary, head_dim=8))
    check_checkpoint(run_config(path, rollout__max_new_tokens=29), PROMPTS)
    with pytest.raises(ConfigError, match=r"prompt 7 has 3 tokens, and rollout\.max_new_tokens is 30.* 32 positions"):
        check_checkpoint(run_config(path, rollout__max_new_tokens=30), PROMPTS)


def test_a_tokenizer_of_another_model_is_refused(save_checkpoint: Callable[..., Path]) -> None:
    """FOUND-L8: a prompt with a token that the embeddings do not have."""
    path = save_checkpoint(tiny(vocab_size=8))
    with pytest.raises(ConfigError, match=r"prompt 7 has token 14, and the model of .* knows tokens 0 to 7"):
        check_checkpoint(run_config(path), PROMPTS)
