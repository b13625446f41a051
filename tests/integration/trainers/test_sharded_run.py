"""A whole run on Ray and TransferQueue whose two ranks keep a model together."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay

pytestmark = pytest.mark.ray
OPTIONS = {
    "run.steps": "4",
    "rollout.groups_per_step": "4",
    "rollout.group_size": "4",
    "trainer.sharding": "full",
    "trainer.reference_kl": "0.05",
    "trainer.sft_warm_up_steps": "3",
    "evaluation.every": "2",
    "checkpoint.every_steps": "2",
}


@pytest.mark.long
@pytest.mark.timeout(500)
def test_sharded_ranks_train_evaluate_save_and_are_resumed_whole(tmp_path: Path, warm_python: Any) -> None:
    """Every sample has one fate, the log replays, and ranks that are not sharded go on from the last checkpoint."""
    words = [f"--set={key}={value}" for key, value in OPTIONS.items()]
    ran = warm_python(tmp_path, "-m", "asyncrl", "train", "--run-dir", "run", *words, timeout_s=240, ray=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    more = ["--set=trainer.sharding=none", "--set=run.steps=6"]
    again = warm_python(tmp_path, "-m", "asyncrl", "train", "--resume", "run", *more, timeout_s=240, ray=True)
    assert again.returncode == 0, again.stdout + again.stderr
    recording = Recording.read(tmp_path / "run")
    assert sum(isinstance(event, StepEnded) for event in recording.events) == 6
    assert prove(recording.events).faults() == []
    assert replay(recording).difference is None
