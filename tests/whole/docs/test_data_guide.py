"""The guide on data: its questions are written, read and checked as it says, and its keys exist."""

import re
from pathlib import Path

import pytest

from asyncrl.collectors.data.check import CHECKED_RECORDS, LONGEST, RUN_RECORDS, RUNS
from asyncrl.collectors.data.prompts import BAD, HELD_OUT, TOO_LONG, TOO_SHORT
from asyncrl.configs import load
from asyncrl.configs.sections.task import Data
from asyncrl.engine.running.checks import check_runnable

TEXT = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, flags=re.S)


def test_the_questions_of_the_guide_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (questions,) = blocks("python")
    exec(compile(questions, "docs/data.md", "exec"), {})
    Path("arithmetic.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    prepared = check_runnable(load("arithmetic.yaml"))
    assert prepared.stream is not None
    assert prepared.stream.prompts == 200
    prompt = next(prepared.stream)
    assert prompt.fields == {"question": prompt.text, "answer": int(prompt.answer), "kind": prompt.dataset}
    assert len(prepared.examples) == 200


def test_keys_limits_and_reasons_of_the_guide_are_those_of_the_code() -> None:
    named = set(re.findall(r"`data\.(\w+)", TEXT))
    assert named - set(Data.model_fields) == set()
    assert f"up to {CHECKED_RECORDS:,}, and {RUNS * RUN_RECORDS:,} of a larger one" in TEXT
    assert f"the {LONGEST:,} longest" in TEXT
    assert all(f"`{reason}`" in TEXT for reason in (BAD, TOO_LONG, TOO_SHORT, HELD_OUT))
