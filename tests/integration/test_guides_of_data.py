"""The guides on data and on evaluation, as a newcomer would follow them in an empty folder: all their commands run.

What takes minutes is cut short by limits that are put behind a command.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FEW = ["--runtime", "local", "--steps", "2", "--set", "trainer.sft_warm_up_steps=2"]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.S)


def run(warm_python: Any, folder: Path, command: str, *more: str) -> str:
    """Run a line of a guide in a folder; returns what it prints."""
    program, first, *rest = shlex.split(command, comments=True)
    words = ["-m", "asyncrl", first] if program == "asyncrl" else ["-c", (folder / first).read_text()]
    done = warm_python(folder, *words, *rest, *more)
    assert done.returncode == 0, command + done.stdout + done.stderr
    return str(done.stdout)


def summaries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("runs/*/summary.json"))]


@pytest.fixture
def questions(tmp_path: Path, warm_python: Any) -> Path:
    """The newcomer's folder, with the 200 questions of the guide."""
    (tmp_path / "make_questions.py").write_text(blocks("data.md", "python")[0], encoding="utf-8")
    run(warm_python, tmp_path, "python make_questions.py")
    assert len((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()) == 200
    return tmp_path


def test_the_commands_of_the_guide_on_data_run(questions: Path, warm_python: Any) -> None:
    (questions / "arithmetic.yaml").write_text(blocks("data.md", "yaml")[0], encoding="utf-8")
    whole, made = (block.splitlines() for block in blocks("data.md", "bash"))
    assert [line.split("#")[0].split() for line in (*whole, *made)] == [
        ["asyncrl", "train", "--data", "train.jsonl"],
        ["python", "make_questions.py"],
        ["asyncrl", "train", "--config", "arithmetic.yaml", "--dry-run"],
        ["asyncrl", "train", "--config", "arithmetic.yaml"],
    ]
    assert "data.prompt_column" in run(warm_python, questions, made[1])
    run(warm_python, questions, made[2], *FEW)
    # The fields have other names than in this file.
    run(warm_python, questions, whole[0], *FEW, "--set", "data.prompt_column=question")
    assert [summary["steps"] for summary in summaries(questions)] == [2, 2]


def test_the_commands_of_the_guide_on_evaluation_run(questions: Path, warm_python: Any) -> None:
    records = (questions / "train.jsonl").read_text(encoding="utf-8").replace('"question"', '"prompt"')
    (questions / "train.jsonl").write_text(records, encoding="utf-8")
    (questions / "test.jsonl").write_text("".join(records.splitlines(keepends=True)[:10]), encoding="utf-8")
    train, last, best, other = blocks("evaluation.md", "bash")[0].splitlines()
    run(warm_python, questions, train, *FEW)
    (summary,) = summaries(questions)
    assert summary["evaluation"]["last"]["version"] == summary["steps"] == 2
    (folder,) = (questions / "runs").iterdir()
    named = re.compile(r"runs/\d{8}-\d{6}|FOLDER")
    assert "pass@1" in run(warm_python, questions, named.sub(f"runs/{folder.name}", last))
    if not (folder / "model-best").is_dir():  # Two steps may leave version 0 the best, which is not saved.
        best = best.replace(" --best", "")
    assert "pass@8" in run(warm_python, questions, named.sub(f"runs/{folder.name}", best))
    found = json.loads(run(warm_python, questions, named.sub(f"runs/{folder.name}/model", other)))
    assert found["scores"]["prompts"] == 10
