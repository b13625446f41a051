"""The code of the guides runs, in order, as a reader would run it."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.collectors.rewards.load import BUILT_IN as REWARDS
from asyncrl.configs import preset_names
from asyncrl.filters.load import BUILT_IN

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("guide", ["docs/fan-out.md", "docs/filters.md", "docs/python.md", "README.md"])
def test_the_python_of_a_guide_runs(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), flags=re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, guide, "exec"), names)


def test_the_filter_of_the_readme_is_six_lines_and_keeps_the_contract() -> None:
    from asyncrl.filters.testing import check_filter

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, flags=re.S)[0]
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 6
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, "README.md", "exec"), names)
    check_filter(names["ShortOnly"])


def test_every_built_in_filter_is_in_the_reference() -> None:
    text = (ROOT / "docs/filters.md").read_text(encoding="utf-8")
    table = text.partition("## Built-in filters")[2].partition("## Staleness")[0]
    assert {name for name in BUILT_IN if f"| `{name}` |" not in table} == set()


def test_every_built_in_reward_is_in_the_guide() -> None:
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    table = text.partition("## Built-in rewards")[2].partition("##")[0]
    assert {name for name in REWARDS if f"| `{name}` |" not in table} == set()


def test_the_readme_names_the_presets_and_its_links_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in preset_names() if f"`{name}`" not in text} == set()
    for name in re.findall(r"`((?:engine|filters|docs|scripts)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
