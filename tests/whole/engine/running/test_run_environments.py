"""Whole runs with an environment: several turns are trained, a run at staleness 0 repeats itself, and logs replay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl import Summary
from asyncrl.engine.cli import app

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


@pytest.mark.parametrize("staleness", [0, 2])
def test_turns_are_trained_and_replies_are_not(small: Small, tmp_path: Path, staleness: int) -> None:
    summary = small({**GUESS, "rollout.max_staleness": staleness})
    assert summary.exit_code == 0
    assert summary.steps == 3
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
