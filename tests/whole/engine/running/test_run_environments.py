"""Whole runs with an environment: several turns are trained, a run at staleness 0 repeats itself, and logs replay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asyncrl import Summary
from asyncrl.collectors.environments import Environment, Step, Turn
from asyncrl.configs import Override, load
from asyncrl.engine.cli import app
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.running.checks import check_runnable

from .test_run_over_http import options, serving

Small = Callable[..., Summary]

GUESS = {
    "environment.name": "guess",
    "environment.options": {"numbers": 4},
    "environment.max_turns": 3,
    "environment.max_tokens": 16,
    "trainer.sft_warm_up_steps": 20,
}


def puts(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(
        (event for event in map(json.loads, lines) if event["type"] == "put"), key=lambda event: int(event["group"])
    )


class Digits(Environment):
    """Three turns, for a checkpoint that knows digits."""

    async def step(self, state: Any, turn: Turn) -> Step:
        return Step("8>", done=turn.number == 2, reward=float("7" in turn.text))


@pytest.mark.parametrize("staleness", [0, 2])
def test_turns_are_trained_and_replies_are_not(small: Small, tmp_path: Path, staleness: int) -> None:
    """At age 0 every trained token has the log-probability that the trainer finds, so its context is the same."""
    steps: list[StepEnded] = []
    summary = small({**GUESS, "rollout.max_staleness": staleness}, progress=steps.append)
    assert summary.exit_code == 0
    assert summary.steps == 3
    if not staleness:
        assert [step.metrics["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 3, abs=1e-4)
    tags = [event["tags"] for event in puts(tmp_path / "out")]
    replies = sum(sum(tag["response_tokens"]) - sum(tag["trainable_tokens"]) for tag in tags)
    assert replies > 0
    assert replies % 2 == 0  # `h>`, `l>` and `n>` are two tokens each.
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output


def test_at_staleness_0_one_seed_gives_one_run(small: Small, tmp_path: Path) -> None:
    """Turns of samples that were granted together decode in step, so every token is the same."""
    for name in ("one", "two"):
        small({**GUESS, "rollout.max_staleness": 0}, directory=name)
    one, two = puts(tmp_path / "one"), puts(tmp_path / "two")
    assert len(one) >= 6
    assert [event["tags"] for event in one] == [event["tags"] for event in two]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


def test_servers_over_http_are_asked_turn_by_turn(small: Small, llama_checkpoint: Path, tmp_path: Path) -> None:
    """What the servers say of each token is what the trainer finds, behind replies too."""
    steps: list[StepEnded] = []
    more = {
        "environment.name": f"{__name__}:Digits",
        "environment.max_tokens": 12,
        "data.path": str(tmp_path / "asked.jsonl"),
        "rollout.max_staleness": 0,
        "rollout.max_new_tokens": 4,
        "rollout.stop_strings": ["7", "1"],
        "data.prompt_format": "9{prompt}>",
        "trainer.sft_warm_up_steps": 0,
        "trainer.sft_warm_up_learning_rate": 0.002,
    }
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"prompt": str(i), "answer": "7"}) + "\n" for i in range(8))
    )
    with serving("vllm", llama_checkpoint, 2) as (_, servers):
        summary = small(options(llama_checkpoint, servers, **more), progress=steps.append)
    assert summary.exit_code == 0
    assert [step.metrics["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 4, abs=1e-4)
    assert any("," in text for event in puts(tmp_path / "out") for text in event["tags"]["generated"])


QWEN = """{%- if tools %}
    {{- "<|im_start|>system\nYou may call functions.\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- "<|im_end|>\n" }}{%- endif %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}"""
"""As Qwen2.5's template, shorter."""


def byte_checkpoint(folder: Path) -> Path:
    """Write a random Llama over bytes, with the marks of ChatML and Qwen's way of tools."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Bytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Bytes()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = QWEN
    fast.save_pretrained(folder)
    sizes = {"vocab_size": len(fast), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    ends = {"eos_token_id": fast.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, **ends, num_attention_heads=2, num_key_value_heads=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_checkpoint_with_a_chat_template_is_asked_with_the_tools(small: Small, tmp_path: Path) -> None:
    """A random model says nonsense, and is rewarded for it by chance; the prompts hold the schema of the tool."""
    folder = byte_checkpoint(tmp_path / "model")
    config = {
        "model.path": str(folder),
        "environment.name": "calculator",
        "environment.options": {"questions": 20},
        "environment.max_tokens": 60,
        "rollout.max_new_tokens": 20,
        "rollout.stop_strings": ["a", "1"],
        "run.batches": 1,
    }
    prompts = check_runnable(load("default", [Override(name, value, "here") for name, value in config.items()])).prompts
    assert prompts[0].text.count('"name": "calculate"') == 1
    assert prompts[0].text.endswith("answer.<|im_end|>\n<|im_start|>assistant\n")
    small(config)
    tags = [event["tags"] for event in puts(tmp_path / "out")]
    assert {status for tag in tags for status in tag["status"]} <= {"finished", "truncated"}
