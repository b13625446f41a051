"""The `asyncrl` command in this process, run from an empty folder of the user's."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from asyncrl.engine.cli import app

Command = Callable[..., Result]

# Typer would read all signatures anew for each of the thousand commands that these tests call.
vars(typer.testing)["_get_command"] = cache(get_command)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with some modules of theirs."""
    (tmp_path / "user_filters.py").write_text(
        "from asyncrl.filters import BaseRolloutFilter, keep\n"
        "class Fine(BaseRolloutFilter):\n"
        "    def __init__(self, longest: int = 3) -> None:\n"
        "        if longest < 1:\n"
        "            raise ValueError(f'longest is {longest}; it must be at least 1')\n"
        "    def judge(self, group, context):\n"
        "        return keep()\n"
        "class Sets(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        return keep()\n"
        "    def state_dict(self):\n"
        "        return {'seen': set()}\n"
        "class NoFilter:\n"
        "    pass\n"
        "class NoJudge(BaseRolloutFilter):\n"
        "    pass\n",
        encoding="utf-8",
    )
    (tmp_path / "user_broken.py").write_text("raise RuntimeError('at import')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("user_filters", "user_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def command(folder: Path) -> Command:
    """Run `asyncrl` with arguments; a refusal must leave the folder as it was."""

    def run(*arguments: str) -> Result:
        before = sorted(folder.rglob("*"))
        result = CliRunner().invoke(app, arguments)
        after = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in str(path)]
        assert after == [path for path in before if "__pycache__" not in str(path)]
        return result

    return run
