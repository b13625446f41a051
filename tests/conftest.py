"""What every test needs: the environment of a run on one node, before Ray is imported, little garbage collection, and
tiny Hugging Face checkpoints of any architecture, with a tokenizer of digits.

Whole folders run in two processes. What starts Ray is one group of pytest-xdist's (`tests/integration/conftest.py`), so
that there is one cluster and one process that uses it, while the other process runs all else.

Hundreds of thousands of objects live as long as the process (modules, models, strategies). Walking them
again and again was a tenth of the unit tests' time.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from asyncrl.engine.lifecycle.process_env import prepare

prepare(threads=1)
# Without compiled files each process that a test starts compiles all of asyncrl again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The key of the user whose runs the tests are; processes that a test starts have it too.
_STATE = TemporaryDirectory(prefix="asyncrl-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
gc.set_threshold(100_000, 20, 20)

WORKERS = 2


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for folders, none for files that are named: to import torch twice would cost more than it saves."""
    return WORKERS if any(Path(word).is_dir() for word in config.args) else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_ray_of_other_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of `tests/integration` lives in its process until the end; tests that start no Ray have none."""
    if "ray" in sys.modules and not {"unit", "whole"}.isdisjoint(request.path.parts):
        monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)


WORDS = ["<unk>", "</s>", "<s>", "<|end|>", *"0123456789>"]


def _save(folder: Path, config: Any, *, bos: bool = False) -> Path:
    """Write a random model of this configuration, and a tokenizer that may put `<s>` before a text."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>" if bos else None, unk_token="<unk>"
    ).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Save a configuration's random model as the folder `model`, once a test."""
    return lambda config, **options: _save(tmp_path / "model", config, **options)


@pytest.fixture
def llama_checkpoint(save_checkpoint: Callable[..., Path]) -> Path:
    """A tiny Llama with tied embeddings, in a folder with a tokenizer of digits."""
    from transformers import LlamaConfig  # Most tests need no checkpoint.

    return save_checkpoint(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
