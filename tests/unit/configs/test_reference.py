"""The configuration reference: every key has a meaning, and the page in the docs is the one that the code writes."""

from pathlib import Path

import pytest

from asyncrl.configs import flatten, load
from asyncrl.configs.reference import explain, markdown
from asyncrl.engine.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_every_key_says_what_it_takes_and_means() -> None:
    entries = explain()
    assert {entry.path for entry in entries} == set(flatten(load().config))
    assert [entry.path for entry in entries if len(entry.meaning) < 10 or not entry.takes] == []
    # A map is what stands for a type that has no words.
    assert [entry.path for entry in entries if entry.takes == "a map"] == ["task.options", "environment.options"]


def test_a_key_is_found_with_or_without_its_section() -> None:
    assert explain("max_staleness") == explain("rollout.max_staleness")
    assert explain("max_staleness")[0].takes == "an integer of at least 0"
    assert explain("max_staleness")[0].default == "2"
    assert {entry.path for entry in explain("run")} == {path for path in flatten(load().config) if path[:4] == "run."}
    assert [entry.path for entry in explain("threads")] == ["collector.threads", "trainer.threads"]


def test_an_unknown_key_brings_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="has no such key; did you mean max_staleness"):
        explain("max_stalenes")


def test_the_page_in_the_docs_is_up_to_date() -> None:
    """Write it anew with `python -m asyncrl.configs.reference > docs/configuration.md`."""
    assert PAGE.read_text(encoding="utf-8") == markdown()
