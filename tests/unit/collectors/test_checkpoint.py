"""A Hugging Face checkpoint folder serves tokenizer, generator and trainer as the small model does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.tasks import load_task
from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.parts import build_run_model, tokenized
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.model.tokenizer import CharTokenizer, load_tokenizer
from asyncrl.engine.weights.base import InProcess, Offer
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip


def config_of(path: Path | None) -> RunConfig:
    return load("default", [Override("model.path", None if path is None else str(path), "test")]).config


def test_the_folders_tokenizer_adds_nothing_and_loses_nothing(llama_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(str(llama_checkpoint))
    ids = tokenizer.encode("407>")
    assert ids == [8, 4, 11, 14]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "407>"
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 1, 15)
    examples = tokenized(load_task("echo", {}).examples(), tokenizer)
    assert examples[7] == ([11, 14, 11, 1], 2)


def test_a_checkpoint_generates_and_trains_on_policy(llama_checkpoint: Path, running: Any) -> None:
    """Build, generate, train: the ratio is 1; the new weights load into the generator again."""
    config = config_of(llama_checkpoint)
    model = build_run_model(config)
    tokenizer = load_tokenizer(config.model.path)
    assert next(model.parameters()).dtype == torch.float32
    settings = TorchSettings(1.0, Clip(0.2, 0.2, 3.0), (0.9, 0.95), 0.0, 1.0)
    backend = TorchBackend(build_run_model(config), settings, pad_id=tokenizer.pad_id)

    async def main() -> None:
        async with running(model) as generator:
            prompt = tuple(tokenizer.encode("7>"))
            group = await generator.generate(GroupRequest(prompt, tuple(range(8)), 3, 1.0))
            rows = Rows(
                [torch.tensor([*prompt, *c.token_ids], dtype=torch.int32) for c in group],
                [torch.tensor(c.logprobs) for c in group],
                [len(prompt)] * 8,
                [1.0, -1.0] * 4,
                [0] * 8,
                filler=False,
            )
            sums = backend.accumulate(rows, 1).read()
            assert sums.ratio / sums.tokens == pytest.approx(1.0, abs=1e-5)
            assert backend.apply(backend.gradients(), learning_rate=0.1) > 0
            sent = InProcess().send(backend.state())
            await generator.update_weights(1, await InProcess().receive(Offer(sent.content)))
            for name, value in backend.state().items():
                assert torch.equal(model.state_dict()[name], value)

    run_virtual(main)


def test_equal_seeds_give_equal_small_models_and_no_global_seed_is_touched() -> None:
    config = config_of(None).model
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one, same, other = (build_model(config, vocab_size=32, seed=seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_the_character_tokenizer_is_one_token_a_character() -> None:
    tokenizer = CharTokenizer()
    text = "0123456789abcdefghijklmnopqrs>"
    ids = tokenizer.encode(text)
    assert sorted(ids) == list(range(2, tokenizer.vocab_size))
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert tokenizer.decode([tokenizer.pad_id, ids[3]]) == "_3"
    with pytest.raises(ConfigError, match=r"\['!', 'Z'\]"):
        tokenizer.encode("1Z!")
