"""A log whose file fails: told once, torn where it failed, and the folds go on."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.types import AnyEvent, GroupFailed, digest


@contextmanager
def room_for(file_bytes: int) -> Iterator[None]:
    """Let no file of this process grow over so many bytes: to whoever writes, a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Seen:
    """A fold that counts."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def apply(self, event: AnyEvent) -> None:
        self.numbers.append(event.seq)


def event(group: int) -> GroupFailed:
    return GroupFailed(group=group, reason="timeout", error="x" * 500)


def opened(folder: Path, **options: Any) -> EventLog:
    return EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=folder / "events.jsonl", **options)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_log_on_a_full_disk_says_so_once_and_its_folds_go_on(tmp_path: Path, threaded: bool) -> None:
    """FOUND-C11: who ends the run appends to the log that failed."""
    failures: list[NotWritten] = []
    seen = Seen()
    log = opened(tmp_path, threaded=threaded, folds=[seen], on_failure=failures.append)
    with room_for(2000):
        deadline = time.monotonic() + 10
        while not failures and time.monotonic() < deadline:
            log.append(event(len(seen.numbers)))
            log.flush()
        for _ in range(5):
            log.append(event(0))
        log.flush()
        log.close()
    assert [str(failure) for failure in failures] == [
        f"{tmp_path / 'events.jsonl'} could not be written: [Errno 27] File too large"
    ]
    assert seen.numbers == list(range(1, len(seen.numbers) + 1))
    assert [e.seq for e in read_events(tmp_path)] == [1, 2, 3]
    assert not (tmp_path / "events.lock").exists()


@pytest.mark.parametrize("threaded", [False, True])
def test_what_fails_at_the_close_is_told_too(tmp_path: Path, threaded: bool) -> None:
    """FOUND-C11: the last events wait in memory until then."""
    failures: list[NotWritten] = []
    log = opened(tmp_path, threaded=threaded, on_failure=failures.append)
    with room_for(100):
        log.append(event(0))
        log.close()
    assert len(failures) == 1


def test_without_anybody_to_tell_it_is_raised(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append(event(0))
    with room_for(100), pytest.raises(NotWritten, match=r"events\.jsonl could not be written"):
        log.flush()
    log.append(event(1))
    log.close()


def test_half_a_surrogate_pair_is_written_escaped(tmp_path: Path) -> None:
    """FOUND-I10: in an error, as in the tags of a group and their digest."""
    log = opened(tmp_path)
    log.append(GroupFailed(group=0, reason="score_error", error="é \ud800 \udcff"))
    log.close()
    (found,) = read_events(tmp_path)
    assert isinstance(found, GroupFailed)
    assert found.error == "é \\ud800 \\udcff"
    assert msgspec.json.decode((tmp_path / "events.jsonl").read_bytes())["type"] == "group_failed"


def test_tags_that_are_written_escaped_have_the_digest_of_what_is_written() -> None:
    """FOUND-I10: or a replay, which reads the escaped form, would differ."""
    tags = {"dataset": ["\ud800", "b"], "\udcff": 1.0}
    assert digest(tags) == digest({"dataset": ["\\ud800", "b"], "\\udcff": 1.0})
