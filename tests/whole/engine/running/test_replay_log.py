"""`asyncrl.replay`: what a run decided, decided again."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import BaseRolloutFilter, ConfigError, Summary, drop, keep, replay
from asyncrl.engine.errors import TraceError
from asyncrl.filters.base import FilterContext, GroupView
from asyncrl.filters.verdict import Verdict

Small = Callable[..., Summary]


class Every(BaseRolloutFilter):
    """Keeps every `n`th group."""

    def __init__(self, n: int = 2) -> None:
        self._n = n

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("other") if group.group % self._n else keep()


def test_a_run_is_replayed_from_its_folder_or_its_log(small: Small) -> None:
    directory = small().directory
    assert replay(directory).difference is None
    assert replay(str(directory / "events.jsonl")).difference is None


def test_a_filter_object_whose_class_takes_no_parameters_is_found(small: Small) -> None:
    directory = small(filters=[Every()]).directory
    assert replay(directory).difference is None


def test_a_filter_object_is_given_again(small: Small) -> None:
    directory = small({"run.batches": 6}, filters=[Every(3)]).directory
    assert replay(directory, filters=[Every(3)]).difference is None
    other = replay(directory, filters=[Every(2)]).difference
    assert other is not None
    assert "judged" in str(other)


def test_filters_that_the_run_did_not_have_are_refused(small: Small) -> None:
    directory = small().directory
    with pytest.raises(ConfigError, match=r"the run has no filter .*:Every at its place; it has none"):
        replay(directory, filters=[Every()])
    with pytest.raises(TypeError, match="give an object of it"):
        replay(directory, filters=[Every])  # type: ignore[list-item]


def test_a_replay_works_under_an_event_loop(small: Small) -> None:
    directory = small().directory

    async def cell() -> None:
        assert replay(directory).difference is None

    asyncio.run(cell())


def test_a_folder_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        replay(tmp_path)
