"""Tests before the real vLLM: `.venv-vllm/bin/pytest tests/vllm`, after `scripts/install vllm`; skipped elsewhere."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.engine.testing.conformance.engine_contract import EngineTest, Trial, model_teacher

HERE = Path(__file__).parent
VOCABULARY = 32
MAX_LENGTH = 1024


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    # Before pytest-xdist's own hook, which reads the groups.
    missing = find_spec("vllm") is None
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))
            item.add_marker(pytest.mark.xdist_group("vllm"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here: scripts/install vllm"))
    return (yield)


@cache
def llama(tied: bool, seed: int) -> Any:
    """Return a Llama of 0.1 million weights, large enough in each layer to matter."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


@dataclass(frozen=True)
class Served:
    """A trial of an engine that runs in an event loop of its own, for as many tests as like it."""

    portal: BlockingPortal
    trial: Trial
    tied: bool

    def hold(self, test: EngineTest) -> None:
        self.portal.call(test, self.trial)


def trial_of(engine: Any, tied: bool, **more: Any) -> Trial:
    """Return the trial of an engine whose even and odd versions have weights of their own."""
    return Trial(
        engine,
        states=[llama(tied, seed).state_dict() for seed in range(2)],
        vocabulary=VOCABULARY,
        long_tokens=900,
        teacher=model_teacher(lambda version: llama(tied, version % 2)),
        text=lambda tokens: "".join(chr(ord("A") + token) for token in tokens),
        **more,
    )


@contextmanager
def served(trial: Callable[[], AbstractAsyncContextManager[Trial]], tied: bool) -> Iterator[Served]:
    """Run a trial in a thread."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(trial()) as running:
        yield Served(portal, running, tied)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Save version 0 of a model, tied or not."""

    @cache
    def save(tied: bool) -> Path:
        folder: Path = tmp_path_factory.mktemp("tied" if tied else "untied")
        llama(tied, 0).save_pretrained(folder)
        return folder

    return save


def write_tokenizer(folder: Path) -> None:
    """Put a tokenizer of ten digits and `>` beside a model."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *"0123456789>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
