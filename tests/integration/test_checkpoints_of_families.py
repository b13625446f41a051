"""Checkpoints of many families, with the odd files and tokenizers that such folders have: each trains, or is refused.

All are tiny and random. A run of three steps has to be on policy in each, and to save what `from_pretrained` loads and
`asyncrl generate` answers from.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import asyncrl
from asyncrl.engine.cli import app

WORDS = ["<unk>", "</s>", "<s>", "<|end|>", *"0123456789>"]
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


def digits(*, bos: bool = False, **special: str | None) -> PreTrainedTokenizerFast:
    """One token for each digit; with `bos` a text begins with `<s>`."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
        special["bos_token"] = "<s>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **{"eos_token": "</s>", **special})


def in_bytes() -> PreTrainedTokenizerFast:
    """One token for each byte, as GPT-2's, with one special token that is all of BOS, EOS and unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)


def sentences() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a text begins with a space, `▁`, and bytes stand for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"0123456789>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", legacy=False
    )


def with_added(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


@dataclass(frozen=True)
class Case:
    """A checkpoint folder, what of it is odd, and what `refused` says of it if it cannot be trained."""

    kind: str
    config: dict[str, Any]
    tokenizer: Callable[[], PreTrainedTokenizerFast] = digits
    vocabulary: int = 16
    stored: torch.dtype = torch.float32
    shard: str = "5GB"
    generation: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    edited: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: str = ""

    def save(self, folder: Path) -> Path:
        ids = {"vocab_size": self.vocabulary, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 1}
        sizes = {} if self.kind == "GPT2" else {"hidden_size": 16, "num_hidden_layers": 2}
        config = getattr(transformers, f"{self.kind}Config")(**{**ids, **sizes, **self.config})
        self.tokenizer().save_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            model = AutoModelForCausalLM.from_config(config).to(self.stored)
        model.save_pretrained(folder, max_shard_size=self.shard)
        if self.generation:
            (folder / "generation_config.json").write_text(json.dumps(self.generation), encoding="utf-8")
        for name, values in self.edited.items():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            (folder / name).write_text(json.dumps({**found, **values}), encoding="utf-8")
        return folder


BF16 = torch.bfloat16
CASES = {
    "llama_scaled_rope_sharded_bf16": Case(
        "Llama", {**HEADS, "rope_parameters": LLAMA3}, stored=BF16, shard="2KB", settings={"model.dtype": "bfloat16"}
    ),
    "llama_sentencepiece": Case("Llama", {**HEADS, "eos_token_id": 2}, sentences, vocabulary=288),
    "llama_added_end_token": Case(
        "Llama", HEADS, lambda: with_added(digits(), "<|eot|>"), generation={"eos_token_id": [1, 15]}
    ),
    "llama_added_token_without_embedding": Case(
        "Llama", HEADS, lambda: digits(eos_token="<|eot|>"), vocabulary=15, refused="knows tokens 0 to 14"
    ),
    "qwen2_tied_larger_vocabulary": Case(
        "Qwen2", {**HEADS, "tie_word_embeddings": True}, lambda: digits(pad_token="<|end|>"), vocabulary=160
    ),
    "qwen3_yarn_bytes": Case(
        "Qwen3", {**HEADS, "rope_parameters": YARN, "eos_token_id": 256}, in_bytes, vocabulary=304
    ),
    "gemma_bos_kept_first": Case(
        "Gemma", {**HEADS, "tie_word_embeddings": True, "bos_token_id": 2}, lambda: digits(bos=True, pad_token="<unk>")
    ),
    "mixtral_sharded_no_pad": Case(
        "Mixtral", {**HEADS, "num_local_experts": 4, "sliding_window": 4}, shard="2KB", stored=BF16
    ),
    "gpt2_one_special_token": Case("GPT2", {**GPT2, "eos_token_id": 256}, in_bytes, vocabulary=257),
    "phi_partial_rotary": Case("Phi", {**HEADS, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "phi3_sliding": Case("Phi3", {**HEADS, "sliding_window": 4}),
    "bloom_without_the_native_engine": Case("Bloom", {"n_layer": 2, "n_head": 2}),
    "generation_settings_that_contradict": Case(
        "Llama", HEADS, generation={"eos_token_id": 1, "do_sample": False, "temperature": 0.6}
    ),
    "rope_as_it_was_written_before": Case(
        "Llama",
        HEADS,
        edited={"config.json": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}},
    ),
    "bert_that_sees_what_comes": Case(
        "Bert", {"num_attention_heads": 2, "intermediate_size": 24}, refused="it cannot be trained"
    ),
    "model_with_code_of_its_own": Case(
        "Llama",
        HEADS,
        edited={"config.json": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}},
        refused="asyncrl runs no code of a checkpoint",
    ),
    "tokenizer_with_code_of_its_own": Case(
        "Llama",
        HEADS,
        edited={
            "tokenizer_config.json": {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        },
        refused="asyncrl runs no code of a checkpoint",
    ),
    "quantized": Case(
        "Llama",
        HEADS,
        edited={"config.json": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        refused="weights are quantized (gptq)",
    ),
    "no_end_token_in_tokenizer": Case("Llama", HEADS, lambda: digits(eos_token=None), generation={"eos_token_id": 3}),
    "no_end_token_at_all": Case(
        "Llama", {**HEADS, "eos_token_id": None}, lambda: digits(eos_token=None), refused="has no end token"
    ),
}
SMALL = {"rollout.groups_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 6, "rollout.max_staleness": 0}


def train(model: Path, out: Path, settings: dict[str, Any]) -> Any:
    sets = {"model.path": str(model), "filters": [], **SMALL, **settings}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    return CliRunner().invoke(app, ["train", "--runtime", "local", "--run-dir", str(out), "--steps", "3", *words])


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_trains_three_steps_or_is_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model, out = case.save(tmp_path / "checkpoint"), tmp_path / "out"
    result = train(model, out, case.settings)
    if case.refused:
        assert result.exit_code == 2, result.output
        assert case.refused in result.stderr
        assert not out.exists()
        return
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [event["metrics"] for event in events if event["type"] == "step_ended"]
    assert len(steps) == 3
    near = 0.02 if case.settings else 1e-5
    assert [step["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 3, abs=near)
    saved = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    assert saved.dtype == getattr(torch, case.settings.get("model.dtype", "float32"))
    assert saved.config.model_type == AutoModelForCausalLM.from_pretrained(model).config.model_type
    [[answer]] = asyncrl.generate(out, ["7>"], max_new_tokens=6)
    assert isinstance(answer, str)
