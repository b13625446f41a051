"""A whole run with evaluations, in this process: what the log, the summary and the saved models say of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncrl import ConfigError, Summary, evaluate, replay
from asyncrl.collectors.environments.builtin.guess import Guess
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Evaluated, EvaluationEnded
from asyncrl.engine.records import Prompt

Small = Callable[..., Summary]

EVALUATED = {
    "trainer.sft_warm_up_steps": 30,
    "run.batches": None,
    "run.steps": 5,
    "evaluation.every": 2,
    "evaluation.samples": 4,
    "evaluation.temperature": 1.0,
}


def test_a_run_is_evaluated_beside_training_and_its_models_have_the_figures_that_it_says(small: Small) -> None:
    """The weights that an evaluation is pinned to are those saved of the same version, to the figure."""
    summary = small(EVALUATED)
    assert (summary.exit_code, summary.steps, summary.data_plane_keys_left) == (0, 5, 0)
    assert summary.evaluation is not None
    assert (summary.evaluation["ended"], summary.evaluation["failed"], summary.evaluation["skipped"]) == (4, 0, 0)
    events = list(read_events(summary.directory / "events.jsonl"))
    ended = {event.version: event for event in events if isinstance(event, EvaluationEnded)}
    assert sorted(ended) == [0, 2, 4, 5]
    assert sum(isinstance(event, Evaluated) for event in events) == 4 * 10
    last, best = summary.evaluation["last"], summary.evaluation["best"]
    assert evaluate(summary.directory).to_dict()["scores"] == last["scores"] == asdict(ended[5].scores)
    saved = evaluate(summary.directory, best=True)
    assert saved.version is not None
    assert saved.scores == ended[saved.version].scores
    trained = {version: event.scores.pass_at_1 for version, event in ended.items() if version}
    assert trained[saved.version] == max(trained.values())  # type: ignore[type-var]
    note = json.loads((summary.directory / "model-best" / "asyncrl.json").read_text())
    assert (note["best_by"], note["evaluation"]["pass_at_1"]) == ("evaluation", trained[saved.version])
    assert best["scores"]["pass_at"]["1"]["value"] == max(event.scores.pass_at_1 or 0.0 for event in ended.values())
    assert not (summary.directory / "model-evaluated").exists()
    assert replay(summary.directory).difference is None
    assert Summary.read(summary.directory) == summary


class Asked(Guess):
    """Evaluates the games of its first numbers."""

    def evaluation_prompts(self) -> Sequence[Prompt]:
        return self.prompts()[:6]


ENVIRONMENT = {
    "environment.name": f"{__name__}:Asked",
    "environment.options": {"numbers": 4},
    "environment.max_turns": 3,
    "environment.max_tokens": 16,
}


@pytest.mark.parametrize("more", [ENVIRONMENT, {"lora.rank": 4}])
def test_environments_and_adapters_are_evaluated_as_they_are_trained(small: Small, more: dict[str, Any]) -> None:
    """What is saved of the last version has the figures of its evaluation, whole conversations or merged weights."""
    summary = small({**EVALUATED, "run.steps": 2, **more})
    assert summary.exit_code == 0
    assert summary.evaluation is not None
    assert (summary.evaluation["ended"], summary.evaluation["failed"]) == (2, 0)
    last = summary.evaluation["last"]
    assert last["scores"]["prompts"] == (10 if "lora.rank" in more else 6)
    assert evaluate(summary.directory).to_dict()["scores"] == last["scores"]


def test_options_that_cannot_work_are_refused_before_anything_starts(small: Small, tmp_path: Path) -> None:
    for overrides, why in (
        ({"evaluation.every": 0}, r"evaluation\.every .* is 0; it must be an integer of at least 1"),
        ({"evaluation.at_end": False}, r"evaluation\.at_end False and evaluation\.every null"),
        ({"evaluation.samples": 2}, r"evaluation\.samples is 2 and evaluation\.temperature 0"),
        ({"evaluation.path": "a", "evaluation.sets": [{"path": "b"}]}, "give one of them"),
        ({"evaluation.split": "test"}, r"evaluation\.split is 'test' and evaluation\.path null"),
        ({"evaluation.sets": [{"path": "b", "weight": 2.0}]}, "an entry has a weight"),
        ({"evaluation.samples": 300, "evaluation.temperature": 1.0}, r"evaluation\.samples is 300"),
        ({"evaluation.every": 1, "data_plane.capacity_rows": 6}, r"run-ahead needs 6 and evaluation 1 more"),
        ({"evaluation.every": 1, "evaluation.path": str(tmp_path / "no.jsonl")}, r"evaluation: .*no\.jsonl"),
    ):
        with pytest.raises(ConfigError, match=why):
            small(overrides)
    assert not (tmp_path / "out").exists()
