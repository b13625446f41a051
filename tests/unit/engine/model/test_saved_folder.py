"""Models are saved whole or not at all, and load as they were, bit for bit."""

import errno
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.configs import load_config
from asyncrl.configs.sections.model import Model
from asyncrl.engine.errors import AsyncRLError, NotWritten
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.model.checkpoint import load_checkpoint
from asyncrl.engine.model.folder import Note, find_folder, link_files, replace_folder
from asyncrl.engine.model.tokenizer import CharTokenizer, load_tokenizer
from asyncrl.engine.model.writer import ModelWriter

NOTE = Note(version=3, step=3, mean_reward=0.5, reward_window=10, config="0")
SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
MODELS = {
    "tied": transformers.Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "experts": transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=2),
    "other_names": transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, eos_token_id=1),
}


def trained(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Change every weight; return the state as a rank holds it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    return {name: value.detach().to(dtype, copy=True) for name, value in model.state_dict().items()}


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.safetensors").write_text(text, encoding="utf-8")
        NOTE.write(folder)

    return write


def full(folder: Path) -> None:
    fill("half")(folder)
    raise OSError(errno.ENOSPC, "No space left on device")


def text_of(folder: Path) -> str:
    return (folder / "weights.safetensors").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_model_loads_bit_for_bit_in_its_type_and_again(
    save_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """In bfloat16, in several files, and what is saved is a checkpoint to start from."""
    source = save_checkpoint(MODELS[kind])
    settings = (source / "generation_config.json").read_bytes()
    (source / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    config = load_config("default").model.model_copy(update={"path": str(source)})
    model = load_checkpoint(str(source))
    state = trained(model, torch.bfloat16)
    saved, best = tmp_path / "saved", tmp_path / "best"
    ModelWriter(config, model, vocab_size=40, shard="4KB").write(state, [saved, best], NOTE)
    assert len(list(saved.glob("*.safetensors"))) > 1
    for folder in (saved, best):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert {name: value.dtype for name, value in loaded.state_dict().items()} == dict.fromkeys(
            state, torch.bfloat16
        )
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert (saved / "generation_config.json").read_bytes() == settings
    assert (saved / "chat_template.jinja").is_file()
    assert not (saved / "pytorch_model.bin").exists()
    assert Note.read(saved) == replace(NOTE, source=str(source))
    again = load_checkpoint(str(saved))
    assert all(torch.equal(value.to(torch.bfloat16), state[name]) for name, value in again.state_dict().items())
    assert load_tokenizer(str(saved)).encode("12>") == load_tokenizer(str(source)).encode("12>")


def test_the_built_in_model_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    """For transformers as a tokenizer of its own kind; for asyncrl the character tokenizer again."""
    config: Model = load_config("default").model
    model = build_model(config, vocab_size=CharTokenizer.vocab_size, seed=0)
    state = trained(model, torch.float32)
    ModelWriter(config, model, vocab_size=CharTokenizer.vocab_size).write(state, [tmp_path / "model"], NOTE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "model"), load_tokenizer(str(tmp_path / "model"))
    assert isinstance(ours, CharTokenizer)
    assert theirs.encode("17>r") == ours.encode("17>r")
    assert theirs.decode([*ours.encode("17>r"), ours.eos_id], skip_special_tokens=True) == "17>r"
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)


def test_weights_that_are_not_finite_and_a_disk_that_refuses_leave_the_last_model(tmp_path: Path) -> None:
    config = load_config("default").model
    model = build_model(config, vocab_size=CharTokenizer.vocab_size, seed=0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    writer = ModelWriter(config, model, vocab_size=CharTokenizer.vocab_size)
    replace_folder(tmp_path / "model", fill("old"))
    (tmp_path / "file").touch()
    with pytest.raises(NotWritten, match=r"file/model could not be written: .*Not a directory"):
        writer.write(state, [tmp_path / "file" / "model"], NOTE)
    state["lm_head.weight"][0, 0] = math.nan
    with pytest.raises(AsyncRLError, match=r"version 3 was not saved: 1 of \d+ .* such as lm_head.weight"):
        writer.write(state, [tmp_path / "model"], NOTE)
    assert text_of(tmp_path / "model") == "old"


def test_a_full_disk_leaves_the_old_folder_and_nothing_half_written(tmp_path: Path) -> None:
    replace_folder(tmp_path / "model", fill("old"))
    with pytest.raises(OSError, match="No space left"):
        replace_folder(tmp_path / "model", full)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert text_of(tmp_path / "model") == "old"
    replace_folder(tmp_path / "model", fill("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert text_of(tmp_path / "model") == "new"


def test_a_crash_at_any_moment_leaves_a_model_that_is_found(tmp_path: Path) -> None:
    """What a killed process may leave: a part of the new one; the old one aside, and the new one not yet in place."""
    model, old, new = (tmp_path / name for name in ("model", "model.old", "model.new"))
    assert find_folder(model) is None
    new.mkdir()
    fill("part")(new)
    assert find_folder(model) is None
    replace_folder(model, fill("first"))
    model.rename(old)
    new.mkdir()
    fill("whole")(new)
    found = find_folder(model)
    assert found is not None
    assert text_of(found) == "first"
    # The next save begins with what was left: were it to fail, the old one is in its place.
    with pytest.raises(OSError, match="No space left"):
        replace_folder(model, full)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert text_of(model) == "first"


def test_the_best_model_keeps_its_weights_when_the_last_is_replaced(tmp_path: Path) -> None:
    last, best = tmp_path / "model", tmp_path / "model-best"
    replace_folder(last, fill("one"))
    replace_folder(best, lambda folder: link_files(last, folder))
    assert (last / "weights.safetensors").stat().st_ino == (best / "weights.safetensors").stat().st_ino
    replace_folder(last, fill("two"))
    assert (text_of(last), text_of(best)) == ("two", "one")
