"""Evaluation beside training on Ray: weights of one version, a partition of its own, pass@k, and the best model."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl import Summary, evaluate
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Evaluated, EvaluationEnded, EvaluationFailed

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.mark.timeout(300)
def test_a_run_on_ray_is_evaluated_on_schedule_with_pinned_weights(tmp_path: Path, warm_python: Any) -> None:
    """Publishes go on meanwhile, and each evaluation has the figures of the model that its version is saved as.

    On a slow machine version 2 is due while version 0 is evaluated; it is left out then, and the log says so.
    """
    options = {
        "run.steps": 4,
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_staleness": 2,
        "trainer.ranks": 1,
        "trainer.sft_warm_up_steps": 20,
        "filters": [],
        "evaluation.every": 2,
        "evaluation.samples": 2,
        "evaluation.temperature": 1.0,
    }
    sets = [word for name, value in options.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    process = warm_python.start(tmp_path, "-m", "asyncrl", "train", "--run-dir", "run", *sets, ray=True)
    output = "".join(process.communicate(timeout=200))
    assert process.returncode == 0, output
    summary = Summary.read(tmp_path / "run")
    assert summary.evaluation is not None
    assert summary.evaluation["failed"] == 0, output
    assert summary.data_plane_keys_left == 0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    ended = {event.version: event.scores for event in events if isinstance(event, EvaluationEnded)}
    left_out = {event.version for event in events if isinstance(event, EvaluationFailed) and event.skipped}
    assert (sorted({*ended, *left_out}), left_out - {2}) == ([0, 2, 4], set()), output
    assert summary.evaluation["ended"] == len(ended)
    assert all(set(scores.pass_at) == {"1", "2"} for scores in ended.values())
    assert sum(isinstance(event, Evaluated) for event in events) == len(ended) * 10
    assert evaluate(tmp_path / "run").scores == ended[4]
    best = evaluate(tmp_path / "run", best=True)
    assert best.version is not None
    assert best.scores == ended[best.version]
    assert best.scores.pass_at_1 == max(ended[version].pass_at_1 or 0.0 for version in set(ended) - {0})
