"""The commands of the guides: their options exist, and a configuration takes what they set."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from asyncrl.configs import load, parse_set, preset_names
from asyncrl.engine.cli import app

ROOT = Path(__file__).parents[3]


def commands() -> list[str]:
    """Return what follows `asyncrl` in each line of the guides' blocks for a shell, joined over its line ends."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            found += [line[at.end() :] for line in lines if (at := re.match(r"(?:[^#]*[ /])?asyncrl (?=[a-z])", line))]
    return found


def test_the_guides_have_commands() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_guides_has_options_that_exist_and_sets_what_can_be_set(line: str) -> None:
    command: Any = get_command(app)
    words = shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    given = command.make_context(name, words).params
    preset = given.get("config") if given.get("config") in preset_names() else "default"
    load(preset, [parse_set(text) for text in given.get("set_") or []])
