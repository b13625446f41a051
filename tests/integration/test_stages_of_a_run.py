"""Runs with every stage on: recomputed log-probabilities, several updates, a reference; in one process and on Ray."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine import metrics

EVERYTHING = [
    *("--set", "trainer.updates_per_batch=2", "--set", "trainer.recompute_logprobs=true"),
    *("--set", "trainer.reference_kl=0.01", "--set", "trainer.loss_normalisation=sequence_mean"),
    *("--set", "trainer.pad_to_step_length=true", "--set", "trainer.micro_batch_tokens=64"),
]


@pytest.fixture
def asyncrl(warm_python: Any, tmp_path: Path) -> Any:
    """Run a command in the test's folder."""
    return partial(warm_python, tmp_path, "-m", "asyncrl")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == "step_ended"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_every_stage_runs_leaves_nothing_and_replays(tmp_path: Path, asyncrl: Any, runtime: str) -> None:
    """Two ranks; the columns they wrote are read again in training and cleared with their groups."""
    done = asyncrl("train", "--runtime", runtime, "--run-dir", "out", "--steps", "4", *EVERYTHING, ray=runtime == "ray")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["data_plane_keys_left"] == 0
    steps = steps_of(tmp_path)
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        found = step["metrics"]
        assert found[metrics.UPDATES] == 2
        assert found[metrics.FORWARD_SECONDS] > 0
        assert 0 < found[metrics.USED_WEIGHT_MEAN] <= found[metrics.WEIGHT_MEAN]
        assert all(math.isfinite(value) for value in found.values())
        assert len(step["rank_seconds"]) == 2
        assert max(step["rank_seconds"]) == pytest.approx(found[metrics.RANK_SECONDS], abs=1e-6)
    # The first step warms up, and the second is the first to be learnt from.
    assert [len(step["predicted_seconds"]) for step in steps] == [0, 0, 2, 2]
    # The reference is the policy of version 0 and moves no more.
    drift = [step["metrics"][metrics.REFERENCE_KL_MEAN] for step in steps]
    assert 0 <= drift[0] < drift[-1]
    replayed = asyncrl("replay", "out")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "identical" in replayed.stdout
    shown = asyncrl("plan", "show", "out")
    assert "in 2 updates" in shown.stdout
    assert shown.stdout.count(" s predicted, ") >= 2
