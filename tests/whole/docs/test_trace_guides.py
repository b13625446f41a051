"""The code of the guides on logs and simulation runs, in a folder where a run has left its log."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.testing.trace import play, put

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("guide", ["event-log.md", "simulate.md"])
def test_the_python_of_a_guide_runs(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / guide).read_text(encoding="utf-8")
    for folder in re.findall(r'"(runs/[\w-]+)"', text):
        play([put([0, 1])]).write(tmp_path / folder / "events.jsonl")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, guide, "exec"), names)
    assert capsys.readouterr().out
