"""A whole run with an environment of the real package verifiers, evaluated too; skipped where it is not installed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Summary
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import StepEnded

from .test_run_environments import byte_checkpoint, puts

Small = Callable[..., Summary]
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Digits"]


class Digit(vf.Task[vf.TaskData]):
    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content or "") < 8)


class Digits(vf.Taskset[Digit]):
    def load(self):
        return [Digit(vf.TaskData(prompt=f"{i}>"), self.config.task) for i in range(10)]
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "whole_digits.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "whole_digits", raising=False)
    return {
        "environment.name": "verifiers",
        "environment.options": {"taskset": "whole_digits", "evaluate": {"skip": 8}},
        "environment.max_tokens": 60,
        "model.path": str(byte_checkpoint(tmp_path / "model")),
        "rollout.max_staleness": 0,
        "rollout.max_new_tokens": 12,
        "rollout.stop_strings": ["a", "1"],
        "run.batches": 2,
    }


def test_rollouts_of_verifiers_are_trained_and_evaluated(small: Small, options: dict[str, Any], tmp_path: Path) -> None:
    """At age 0 every trained token has the log-probability that the trainer finds, so its context is the same."""
    pytest.importorskip("verifiers.v1")
    steps: list[StepEnded] = []
    summary = small({**options, "evaluation.every": 5}, progress=steps.append)
    assert summary.exit_code == 0
    assert [step.metrics["train/ratio_mean"] for step in steps] == pytest.approx([1.0] * len(steps), abs=1e-4)
    tags = [put["tags"] for put in puts(tmp_path / "out")]
    assert {value for tag in tags for value in tag["short"]} <= {0.0, 1.0}
    assert all(tag["short"] == tag["reward"] for tag in tags)
    assert summary.evaluation is not None
    assert summary.evaluation["first"]["scores"]["prompts"] == 2


def test_verifiers_is_named_where_it_is_missing_and_its_prompts_are_its_own(
    small: Small, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "9>"}\n')
    with pytest.raises(ConfigError, match=r"environment.name is verifiers and data.path .*; its taskset"):
        small({**options, "data.path": str(tmp_path / "more.jsonl")})
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[verifiers\]'"):
            small(options)
