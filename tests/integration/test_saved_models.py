"""What a run learned is on disk when it has ended; a second run goes on from it, and it answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import asyncrl
from asyncrl.engine.cli import app
from asyncrl.engine.generate import find_model
from asyncrl.engine.model.folder import Note

Small = Callable[..., asyncrl.Summary]

SMALL = {
    "run.runtime": "local",
    "run.batches": 3,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "filters": [],
}
LEARNS = {"trainer.sft_warm_up_steps": 60, "trainer.sft_warm_up_batch": 10, "trainer.learning_rate": 1e-6}


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Run a few small batches, in the folder `out` unless told otherwise."""

    def start(overrides: dict[str, Any] | None = None, *, directory: str = "out", **options: Any) -> asyncrl.Summary:
        return asyncrl.run("default", tmp_path / directory, {**SMALL, **(overrides or {})}, **options)

    return start


def first_ratio(directory: Path) -> float:
    events = map(json.loads, (directory / "events.jsonl").read_text(encoding="utf-8").splitlines())
    ratio: float = next(event for event in events if event["type"] == "step_ended")["metrics"]["train/ratio_mean"]
    return ratio


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_run_goes_on_from_what_the_first_has_learned(small: Small, tmp_path: Path, dtype: str) -> None:
    """It begins with the reward that the first ended with, and its first step is on policy; the folder answers."""
    first = small({**LEARNS, "model.dtype": dtype, "rollout.max_staleness": 0})
    assert first.model is not None
    assert first.model["folders"]["model"]["version"] == first.steps == 3
    assert first.reward_last_10 is not None
    assert first.reward_last_10 > 0.5
    saved = tmp_path / "out" / "model"
    weights = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").state_dict()
    assert {value.dtype for value in weights.values()} == {getattr(torch, dtype)}
    more = {"model.path": str(saved), "model.dtype": dtype, "rollout.max_staleness": 0, "trainer.learning_rate": 1e-6}
    second = small(more, directory="second")
    assert second.reward_first_10 == pytest.approx(first.reward_last_10, abs=0.2)
    assert first_ratio(tmp_path / "second") == pytest.approx(1.0, abs=1e-5 if dtype == "float32" else 0.05)
    note = Note.read(tmp_path / "second" / "model")
    assert note is not None
    assert note.characters
    said: list[tuple[int, int, str]] = []
    answers = asyncrl.generate(tmp_path / "second", ["7>", "3>"], on_text=lambda *piece: said.append(piece))
    assert answers == [["7"], ["3"]]
    assert "".join(text for prompt, _, text in said if prompt == 1) == "3"
    assert asyncrl.generate(saved, "7>", samples=2, temperature=0.01) == [["7", "7"]]
    printed = CliRunner().invoke(app, ["generate", str(tmp_path / "out"), "5>", "-"], input="7>\n\n3>\n")
    assert printed.stdout == "# '5>'\n5\n# '7>'\n7\n# '3>'\n3\n"
    assert CliRunner().invoke(app, ["generate", str(saved), "7>"]).stdout == "7\n"
    refused = CliRunner().invoke(app, ["generate", str(saved), ""])
    assert (refused.exit_code, "prompt 0 (the first is 0) is ''; it must be a text" in refused.stderr) == (2, True)
    assert CliRunner().invoke(app, ["generate", str(tmp_path / "no"), "7>"]).exit_code == 2


def test_a_run_whose_model_cannot_be_written_fails_and_says_so(small: Small, tmp_path: Path) -> None:
    """A file lies where the folder is to be, as far as the disk is concerned: the run's own files are there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.new").touch()
    with pytest.raises(asyncrl.RunFailed, match=r"NotWritten: .*out/model could not be written: .*File exists") as told:
        small()
    assert (told.value.summary.model, told.value.summary.steps) == ({"folders": {}, "failed_saves": 1}, 3)
    with pytest.raises(asyncrl.ConfigError, match=r"has no model/: 1 saves failed, and .*log.jsonl says why"):
        find_model(tmp_path / "out")


def test_a_run_that_fails_leaves_the_last_version_that_it_trained(small: Small, tmp_path: Path) -> None:
    def third(step: object) -> None:
        if getattr(step, "step", 0) == 2:
            raise KeyError("mine")

    with pytest.raises(asyncrl.RunFailed, match="mine"):
        small({"run.batches": 100, "run.save_every": 1, "run.reward_window": 1}, progress=third)
    for best in (False, True):
        note = Note.read(find_model(tmp_path / "out", best=best))
        assert note is not None
        assert note.version >= (1 if best else 2)


def test_where_there_is_no_model_the_cause_is_told(small: Small, tmp_path: Path) -> None:
    small({"run.save_model": False})
    refused = {
        "out": r"the run '.*out' has no model/: run.save_model was false",
        "nothing": r"'.*nothing' does not exist; name a run's folder",
        "out/summary.json": r"'.*summary.json' is a file, not a folder",
        ".": r"is neither a run's folder nor a Hugging Face checkpoint",
    }
    for name, message in refused.items():
        with pytest.raises(asyncrl.ConfigError, match=message):
            asyncrl.generate(tmp_path / name, "7>")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    (tmp_path / "out" / "summary.json").write_text(json.dumps({**summary, "steps": 0}), encoding="utf-8")
    with pytest.raises(asyncrl.ConfigError, match="it ended before a step was trained"):
        asyncrl.generate(tmp_path / "out", "7>")
    (tmp_path / "out" / "summary.json").unlink()
    with pytest.raises(asyncrl.ConfigError, match=r"has no model-best/: it goes on or was killed; with run.save_every"):
        asyncrl.generate(tmp_path / "out", "7>", best=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(asyncrl.ConfigError, match=r"cannot generate from '.*broken': "):
        asyncrl.generate(tmp_path / "broken", "7>")
    with pytest.raises(
        asyncrl.ConfigError, match=r"'.*broken' is a checkpoint, and only a run's folder has model-best/"
    ):
        asyncrl.generate(tmp_path / "broken", "7>", best=True)
    odd: tuple[tuple[list[Any], str], ...] = ((["7>", ""], "prompt 1 .* is ''"), ([7], "prompt 0 .* is 7"))
    for prompts, message in odd:
        with pytest.raises(asyncrl.ConfigError, match=message):
            asyncrl.generate(tmp_path / "out", prompts)
    with pytest.raises(asyncrl.ConfigError, match="samples is 3 and temperature 0"):
        asyncrl.generate(tmp_path / "broken", "7>", samples=3)
