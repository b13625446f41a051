"""Small runs of the default task in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Summary, run

Small = Callable[..., Summary]

SMALL = {
    "run.runtime": "local",
    "run.batches": 3,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "filters": [],
}


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Run a few small batches, in the folder `out` unless told otherwise."""

    def start(overrides: dict[str, Any] | None = None, *, directory: str = "out", **options: Any) -> Summary:
        return run("default", tmp_path / directory, {**SMALL, **(overrides or {})}, **options)

    return start


@pytest.fixture
def model(save_checkpoint: Callable[..., Path]) -> Path:
    """A tiny Llama with tied embeddings, in a folder with a tokenizer of digits."""
    from transformers import LlamaConfig  # Most of these tests need no checkpoint.

    return save_checkpoint(
        LlamaConfig(
            vocab_size=15,
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
