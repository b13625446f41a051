"""Checks the format of a log: numbers without a gap, times that do not go back, known groups, a proper end."""

from collections.abc import Iterator
from pathlib import Path

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import effective_events, read_events
from asyncrl.engine.events.segments import read_index, segment_files
from asyncrl.engine.events.types import AnyEvent, Put, Resumed, RunEnded, RunStarted, digest_written
from asyncrl.engine.trace.recording import follows
from asyncrl.engine.trace.untyped import check_untyped


def problems(path: Path) -> Iterator[str]:
    """Yield the problems of a log: in its lines, then in the lives of its groups, then at its end.

    A line that cannot be decoded is the last problem. FileNotFoundError if the log does not exist.
    """
    checks = _Checks()
    try:
        for event in read_events(path):
            yield from checks.apply(event)
    except TraceError as error:
        yield str(error)
        return
    yield from _miscounted(path)
    yield from checks.at_end()
    if path.is_dir():
        yield from _index_problems(path)


def _index_problems(folder: Path) -> Iterator[str]:
    names = {file.name for file in segment_files(folder)}
    try:
        segments = read_index(folder).segments
    except TraceError as error:
        yield str(error)
        return
    for segment in segments:
        if segment.file not in names:
            yield f"the index names segment {segment.file}, which is not there"


def _miscounted(path: Path) -> Iterator[str]:
    """Yield the events that break the order of a group's life, from dispatch to fate."""
    ledger = Ledger()
    for event in effective_events(path):
        try:
            ledger.apply(event)
        except ValueError as error:
            yield f"event {event.seq}: {error}"


class _Checks:
    def __init__(self) -> None:
        self._last: AnyEvent | None = None

    def apply(self, event: AnyEvent) -> Iterator[str]:
        last = self._last
        if last is None and not isinstance(event, RunStarted):
            yield f"event {event.seq}: the log begins with {event.__struct_config__.tag}, not with run_started"
        if last is not None and not follows(last, event):
            yield f"event {event.seq} follows event {last.seq}; numbers go up by one"
        if last is not None and event.t < last.t:
            yield f"event {event.seq}: its time {event.t} is before that of the event before it, {last.t}"
        if isinstance(event, Put) and event.digest is not None and event.digest != digest_written(event.tags):
            yield f"event {event.seq}: the tags of group {event.group} are not those that were put; the digest differs"
        if isinstance(last, RunEnded) and not isinstance(event, RunStarted | Resumed):
            yield f"event {event.seq} comes after the end of the run"
        self._last = event
        try:
            check_untyped(event)
        except TraceError as error:
            yield str(error)

    def at_end(self) -> Iterator[str]:
        if self._last is None:
            yield "the log is empty"
        elif not isinstance(self._last, RunEnded):
            yield f"the log breaks off after event {self._last.seq}; the run did not say how it ended"
