"""Fixtures for users' tests, installed with asyncrl. Imports neither ray, torch nor transfer_queue.

`collector_trace` plays a script, or a recorded log, against the real front end; `golden_trace`
compares what came of it with a file beside the test. What needs torch is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncrl.engine.records import GroupMeta
from asyncrl.filters.testing import check_filter, make_group

if TYPE_CHECKING:
    from asyncrl.engine.testing.trace import Entry, Played


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("asyncrl")
    group.addoption("--refresh-traces", action="store_true", help="write golden traces anew instead of comparing")


@pytest.fixture
def rollout_group() -> Callable[..., GroupMeta]:
    """Make a group by hand: `rollout_group([0.0, 1.0], lengths=[5, 9])`."""
    return make_group


@pytest.fixture
def check_rollout_filter() -> Callable[..., Any]:
    """Run a filter class through its contract: `check_rollout_filter(MyFilter)`."""
    return check_filter


@pytest.fixture
def collector_trace() -> Callable[..., Played]:
    """Play a script or judge a recorded log again: `collector_trace([put([0, 1])], filters=[MyFilter()])`.

    A script is a list of `asyncrl.engine.testing.trace` entries; a log is a path to a run's folder or to
    one file. With a log, `filters` stand in for those of the run; without, it is replayed as it was.
    """

    def play_trace(script_or_log: Sequence[Entry] | str | Path, **settings: Any) -> Played:
        from asyncrl.engine.testing.trace import play, play_log

        if isinstance(script_or_log, str | Path):
            return play_log(Path(script_or_log), **settings)
        return play(script_or_log, **settings)

    return play_trace


@pytest.fixture
def golden_trace(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare with `traces/NAME.jsonl` beside the test: `golden_trace(played, "two_groups")`.

    With `--refresh-traces` the file is written anew.
    """

    def compare(played: Played, name: str) -> None:
        from asyncrl.engine.testing.trace import compare_with_golden

        golden = Path(request.path).parent / "traces" / f"{name}.jsonl"
        compare_with_golden(played.events, golden, refresh=request.config.getoption("--refresh-traces"))

    return compare
