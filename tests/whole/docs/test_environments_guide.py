"""The guide of environments: its files are written, and its code runs in order."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.environments.load import BUILT_IN

GUIDE = (Path(__file__).parents[3] / "docs/environments.md").read_text(encoding="utf-8")


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    names: dict[str, Any] = {"__name__": "guide"}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)
    assert len(blocks) == 5
    for block in blocks:
        file = re.match(r"# (\w+\.py)\n", block)
        if file:
            (tmp_path / file.group(1)).write_text(block, encoding="utf-8")
        else:
            exec(compile(block, "docs/environments.md", "exec"), names)
    for run in ("twice", "agent"):
        assert '"generated":' in (tmp_path / f"runs/{run}/events.jsonl").read_text(encoding="utf-8")


def test_every_built_in_environment_is_in_the_guide() -> None:
    table = GUIDE.partition("| built in |")[2].partition("## Your own")[0]
    assert {name for name in BUILT_IN if f"| `{name}` |" not in table} == set()
