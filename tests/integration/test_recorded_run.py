"""A run recorded by `asyncrl train`, and what the commands on logs make of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.trace.loss_inputs import load


@pytest.fixture
def asyncrl(warm_python: Any, tmp_path: Path) -> Any:
    """Run a command in the test's folder."""
    return partial(warm_python, tmp_path, "-m", "asyncrl")


def test_a_run_with_tensors_replays_is_proved_and_gives_back_its_loss_inputs(tmp_path: Path, asyncrl: Any) -> None:
    """On Ray: test_ray_runtime."""
    small = ["--set", "run.batches=12", "--set", "rollout.groups_per_step=8", "--runtime", "local"]
    done = asyncrl("train", *small, "--record", "tensors", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    done = asyncrl("replay", "out", "--step", "1", "--out", "step.safetensors")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "identical"), done.stdout
    inputs = load(tmp_path / "step.safetensors")
    assert sum(len(rows.tokens) for rank in inputs.rows for rows in rank if not rows.filler) >= 16
    assert asyncrl("ledger", "out").returncode == 0
    assert asyncrl("trace", "validate", "out").stdout == "out is a valid log\n"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(asyncrl("trace", "stats", "out", "--json").stdout) == summary
