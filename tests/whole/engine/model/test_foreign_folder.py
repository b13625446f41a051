"""A folder of another's with a model: it is loaded or refused, and nothing of it is run."""

import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl import generate
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.tokenizer import load_tokenizer


class _Touches:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return (os.mknod, (str(self._canary),))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "CANARY"


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **values}), encoding="utf-8")


def own_model(folder: Path) -> None:
    own_code_for_a_known_model(folder)
    edit(folder / "config.json", model_type="theirs")


def own_code_for_a_known_model(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoConfig": "theirs.T", "AutoModelForCausalLM": "theirs.T"})


def own_tokenizer(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["theirs.T", "theirs.T"]})


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touches(folder.parent / "CANARY")))


def a_kernel_of_the_hub(folder: Path) -> None:
    edit(folder / "config.json", _attn_implementation="theirs/kernel", attn_implementation="theirs/kernel")


@pytest.mark.parametrize(
    "evil", [own_model, own_code_for_a_known_model, own_tokenizer, pickled_weights, a_kernel_of_the_hub]
)
def test_code_of_a_folder_is_never_run(
    evil: Callable[[Path], None], llama_checkpoint: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(canary.parent / "modules"))
    (llama_checkpoint / "theirs.py").write_text(
        f"import os\nos.mknod({str(canary)!r})\nfrom transformers import LlamaForCausalLM as T\n", encoding="utf-8"
    )
    evil(llama_checkpoint)
    with suppress(ConfigError):
        generate(llama_checkpoint, ["7>"], max_new_tokens=1)
    assert not canary.exists()


def test_a_chat_template_cannot_reach_the_system(llama_checkpoint: Path, canary: Path) -> None:
    template = "{{ cycler.__init__.__globals__.os.mknod('" + str(canary) + "') }}"
    edit(llama_checkpoint / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match="template refuses"):
        load_tokenizer(str(llama_checkpoint)).chat([{"role": "user", "content": "7"}])
    assert not canary.exists()
