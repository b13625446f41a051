"""A run recorded by `asyncrl train`, and what the commands on logs make of it."""

import json
import subprocess
import sys
from pathlib import Path

from asyncrl.engine.trace.loss_inputs import load


def asyncrl(folder: Path, *words: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_run_with_tensors_replays_is_proved_and_gives_back_its_loss_inputs(tmp_path: Path) -> None:
    """On Ray: test_ray_runtime."""
    small = ["--set", "run.batches=12", "--set", "rollout.groups_per_step=8", "--runtime", "local"]
    done = asyncrl(tmp_path, "train", *small, "--record", "tensors", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    done = asyncrl(tmp_path, "replay", "out", "--step", "1", "--out", "step.safetensors")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "identical"), done.stdout
    inputs = load(tmp_path / "step.safetensors")
    assert sum(len(rows.tokens) for rank in inputs.rows for rows in rank if not rows.filler) >= 16
    assert asyncrl(tmp_path, "ledger", "out").returncode == 0
    assert asyncrl(tmp_path, "trace", "validate", "out").stdout == "out is a valid log\n"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(asyncrl(tmp_path, "trace", "stats", "out", "--json").stdout) == summary
