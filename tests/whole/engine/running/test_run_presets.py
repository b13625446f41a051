"""The preset `gsm8k-like` with a tiny checkpoint: word problems of a file, chat template, math-verify, evaluation."""

import json
from pathlib import Path

from asyncrl import run
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Put

from .test_run_environments import byte_checkpoint


def test_word_problems_are_trained_and_evaluated_in_the_shape_of_the_preset(tmp_path: Path) -> None:
    """A random model answers nothing right: what is shown is that all parts of the preset go together."""
    file = tmp_path / "word_problems.jsonl"
    problems = [{"prompt": f"{name} has {i} pens and buys 2. How many?", "answer": str(i + 2)}
                for i in range(20) for name in ("Ann", "Ben")]  # fmt: skip
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    overrides = {
        "run.runtime": "local",
        "run.steps": 1,
        "model.path": str(byte_checkpoint(tmp_path / "model")),
        "data.path": str(file),
        "data.holdout": 0.2,
        "rollout.groups_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 12,
        "rollout.max_staleness": 0,
        "evaluation.max_prompts": 4,
        "filters": [],
    }
    summary = run("gsm8k-like", tmp_path / "out", overrides)
    assert (summary.exit_code, summary.steps) == (0, 1)
    puts = [event.tags for event in read_events(tmp_path / "out" / "events.jsonl") if isinstance(event, Put)]
    assert len(puts) == 2
    assert all(tags["math_verify"] == tags["reward"] == [0.0, 0.0] for tags in puts)
    front, behind = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    asked = "Ann has 3 pens and buys 2. How many?\nThink step by step, and put the final answer in \\boxed{}."
    marks = sum((front + behind).count(mark) * (len(mark) - 1) for mark in ("<|im_start|>", "<|im_end|>"))
    assert {tags["prompt_tokens"] for tags in puts} <= {len(front + asked + behind) - marks + i for i in (0, 1)}
    assert summary.evaluation is not None
    assert summary.evaluation["last"]["scores"]["prompts"] == 4
