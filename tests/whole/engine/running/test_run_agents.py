"""Whole runs with agents that ask over HTTP: what is trained is what was sampled, and a run at staleness 0 repeats."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Summary
from asyncrl.collectors.tasks.base import Reward
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.records import Prompt

from .test_run_environments import byte_checkpoint, puts

Small = Callable[..., Summary]


def solve(prompt: Prompt, base_url: str, api_key: str) -> Reward:
    """Ask twice, in a thread, and take the first answer; what a limit cuts is worth nothing."""
    messages: list[Any] = [{"role": "system", "content": "9"}, {"role": "user", "content": prompt.text}]
    said = []
    for _ in range(2):
        body = json.dumps({"messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            choice = json.load(answer)["choices"][0]
        said.append(choice["message"]["content"])
        if choice["finish_reason"] == "length":
            break
        messages += [choice["message"], {"role": "user", "content": "8>"}]
    return Reward(float(said[0] == prompt.answer), {"turns": float(len(said))})


def asking(folder: Path, **more: Any) -> dict[str, Any]:
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": str(i)}) + "\n" for i in range(10)))
    return {
        "environment.name": "agent",
        "environment.options": {"function": f"{__name__}:solve"},
        "environment.max_tokens": 16,
        "rollout.max_staleness": 0,
        "trainer.sft_warm_up_steps": 20,
        "data.path": str(file),
        **more,
    }


def test_what_agents_are_answered_is_trained_and_one_seed_gives_one_run(small: Small, tmp_path: Path) -> None:
    """At age 0 every trained token has the log-probability that the trainer finds, so its context is the same."""
    steps: list[StepEnded] = []
    for name in ("one", "two"):
        assert small(asking(tmp_path), directory=name, progress=steps.append).exit_code == 0
    assert [step.metrics["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * 6, abs=1e-4)
    one, two = ([put["tags"] for put in puts(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert all(tags["prompt_tokens"] == 3 for tags in one)
    assert {turns for tags in one for turns in tags["turns"]} == {1.0, 2.0}


def test_agents_of_a_checkpoint_write_its_chat(small: Small, tmp_path: Path) -> None:
    folder = byte_checkpoint(tmp_path / "model")
    steps: list[StepEnded] = []
    more = {
        "model.path": str(folder),
        "environment.max_tokens": 120,
        "rollout.max_new_tokens": 20,
        "rollout.stop_strings": ["a", "1"],
        "trainer.sft_warm_up_steps": 0,
        "run.batches": 1,
    }
    assert small(asking(tmp_path, **more), progress=steps.append).exit_code == 0
    text = "<|im_start|>system\n9<|im_end|>\n<|im_start|>user\n0><|im_end|>\n<|im_start|>assistant\n"
    marks = text.count("<|im_start|>") + text.count("<|im_end|>")
    tokens = len(text.replace("<|im_start|>", "").replace("<|im_end|>", "")) + marks
    assert {put["tags"]["prompt_tokens"] for put in puts(tmp_path / "out")} == {tokens}


def test_agents_without_prompts_are_refused(small: Small, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment.name agent: it has no prompts; .* give a file with --data FILE"
    ):
        small({"environment.name": "agent", "environment.options": {"function": f"{__name__}:solve"}})
    with pytest.raises(ConfigError, match=r"data.system_prompt is set, and an agent writes its own messages"):
        small(asking(tmp_path, **{"data.system_prompt": "Be brief."}))
