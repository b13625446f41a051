"""Tiny Hugging Face checkpoints of any architecture, with a tokenizer of digits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
