"""A run that a tagger brings to its end: its log says who and why, proves all samples, and replays."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import GroupFailed, RunEnded

FILTER = """
from asyncrl.filters import BaseRolloutFilter, keep

calls = 0


def words(tokens):
    global calls
    calls += 1
    return {*tokens} if calls > 400 else len(tokens)  # A set is not a tag: no log can write it.


class Words(BaseRolloutFilter):
    taggers = {"words": words}

    def judge(self, group, context):
        return keep()
"""


@pytest.fixture
def asyncrl(warm_python: Any, tmp_path: Path) -> Any:
    """Run a command in the test's folder."""
    return partial(warm_python, tmp_path, "-m", "asyncrl")


def test_the_log_of_a_run_whose_tagger_fails_names_it_and_replays(tmp_path: Path, asyncrl: Any) -> None:
    """FOUND-C14: each group fails with the filter's name, and after eight in a row the run ends with it."""
    (tmp_path / "my_words.py").write_text(FILTER, encoding="utf-8")
    small = ["--set", "rollout.groups_per_step=4", "--set", "rollout.group_size=8", "--set", "filters=[]"]
    words = ["train", "--runtime", "local", "--filter", "my_words:Words", *small, "--run-dir", "out"]
    done = asyncrl(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    *before, end = read_events(tmp_path / "out")
    failed = [event for event in before if isinstance(event, GroupFailed)]
    assert len(failed) >= 8
    assert {event.reason for event in failed} == {"tagger_error"}
    assert all("words" in event.error for event in failed)
    assert isinstance(end, RunEnded)
    assert (end.code, end.keys_left) == (1, 0)
    assert end.reason.startswith("GenerationError: ")
    assert "groups in a row failed in collector0" in end.reason
    done = asyncrl("replay", "out")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "identical"), done.stdout
    done = asyncrl("ledger", "out")
    assert done.returncode == 0, done.stdout
    assert asyncrl("trace", "validate", "out").stdout == "out is a valid log\n"
