"""Whole runs on Ray whose replicas are held by several processes.

Whole replicas of the PyTorch backend stand in for parts of one, which a configuration does not allow: each sibling
computes all that its leader does.
"""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Planned, RunEnded, StepEnded

pytestmark = [pytest.mark.ray, pytest.mark.long]

RUN = """
import json, sys
from dataclasses import replace
import asyncrl
from asyncrl.configs import load
from asyncrl.configs.load import as_overrides

ranks, tensor, settings = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
loaded = load("default", as_overrides({**settings, "trainer.ranks": ranks, "supervision.start_timeout_s": 240}))
trainer = loaded.config.trainer.model_copy(update={"tensor_parallel": tensor})
config = loaded.config.model_copy(update={"trainer": trainer})
asyncrl.run(replace(loaded, config=config), "run")
"""
SETTINGS = {
    "rollout.max_staleness": 0,
    "run.steps": 4,
    "trainer.recompute_logprobs": True,
    "trainer.sft_warm_up_steps": 2,
    "checkpoint.every_steps": 2,
    "supervision.run_restarts": 0,
}


def start(folder: Path, warm_python: Any, *, ranks: int, tensor: int = 1, **settings: Any) -> Any:
    folder.mkdir()
    chosen = json.dumps({**SETTINGS, **{name.replace("__", "."): value for name, value in settings.items()}})
    return warm_python.start(folder, "-c", RUN, str(ranks), str(tensor), chosen, ray=True)


@pytest.mark.timeout(290)
def test_a_run_is_that_of_the_replicas_alone_to_the_bit(tmp_path: Path, warm_python: Any) -> None:
    """Warm-up, recomputed log-probabilities, training, publishing, a checkpoint and the saved model."""
    for name, options in (
        ("alone", {"ranks": 2, "run__runtime": "local"}),
        ("together", {"ranks": 4, "tensor": 2}),
    ):
        out, err = start(tmp_path / name, warm_python, **options).communicate(timeout=280)
        assert (tmp_path / name / "run" / "summary.json").exists(), out + err
    alone, together = (list(read_events(tmp_path / name / "run")) for name in ("alone", "together"))
    for events in (alone, together):
        assert isinstance(events[-1], RunEnded)
        assert events[-1].code == 0
    planned = [[event.ranks for event in events if isinstance(event, Planned)] for events in (alone, together)]
    assert planned[0] == planned[1]
    assert {len(ranks) for ranks in planned[1]} == {2}
    steps = [[event for event in events if isinstance(event, StepEnded)] for events in (alone, together)]
    for ours, theirs in zip(*steps, strict=True):
        for name in ("train/loss", "train/tokens", "train/grad_norm", "train/ranks"):
            assert ours.metrics[name] == theirs.metrics[name]
    weights = [load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("alone", "together")]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    trainer = tmp_path / "together" / "run" / "checkpoints" / "v000004" / "trainer"
    assert len(list(trainer.glob("rank-?????.json"))) == 4, sorted(trainer.parent.parent.iterdir())


@pytest.mark.timeout(200)
def test_the_death_of_a_sibling_ends_the_run_in_seconds_by_its_name(tmp_path: Path, warm_python: Any) -> None:
    run = start(tmp_path / "run", warm_python, ranks=2, tensor=2, run__steps=500, run__batches=500)
    log = tmp_path / "run" / "run" / "events.jsonl"
    deadline = time.monotonic() + 150
    while not (log.exists() and '"step_ended"' in log.read_text(encoding="utf-8", errors="replace")):
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate(timeout=10)
        time.sleep(0.1)
    children = psutil.Process(run.pid).children(recursive=True)
    second = [child for child in children if "RankActor" in " ".join(child.cmdline())][1]
    second.kill()
    killed = time.monotonic()
    out, err = run.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert run.returncode == 1
    ended = list(read_events(log.parent))[-1]
    assert isinstance(ended, RunEnded)
    assert "rank" in ended.reason, out + err
    assert "died" in ended.reason
