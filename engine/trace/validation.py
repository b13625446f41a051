"""Whether a log keeps its format: numbers without a gap, times that do not go back, known groups, a whole end."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.segments import read_index, segment_files
from asyncrl.engine.events.types import AnyEvent, Put, Resumed, RunEnded, RunStarted, digest_written


def problems(path: Path) -> Iterator[str]:
    """Yield what is wrong with a log, in the order of its events; nothing if it is whole.

    Whatever cannot be decoded is the last problem. FileNotFoundError if there is no log.
    """
    checks = _Checks()
    try:
        for event in read_events(path):
            yield from checks.apply(event)
    except msgspec.DecodeError as error:
        yield str(error)
        return
    yield from checks.at_end()
    if path.is_dir():
        names = {file.name for file in segment_files(path)}
        yield from (
            f"the index names segment {segment.file}, which is not there"
            for segment in read_index(path).segments
            if segment.file not in names
        )


class _Checks:
    def __init__(self) -> None:
        self._last: AnyEvent | None = None
        self._ledger: Ledger | None = Ledger()

    def apply(self, event: AnyEvent) -> Iterator[str]:
        last = self._last
        if last is None and not isinstance(event, RunStarted):
            yield f"event {event.seq}: the log begins with {event.__struct_config__.tag}, not with run_started"
        if last is not None and event.seq != last.seq + 1:
            yield f"event {event.seq} follows event {last.seq}; numbers go up by one"
        if last is not None and event.t < last.t and not isinstance(event, RunStarted | Resumed):
            yield f"event {event.seq}: its time {event.t} is before that of the event before it, {last.t}"
        if isinstance(event, Put) and event.digest is not None and event.digest != digest_written(event.tags):
            yield f"event {event.seq}: the tags of group {event.group} are not those that were put; the digest differs"
        if isinstance(last, RunEnded) and not isinstance(event, RunStarted | Resumed):
            yield f"event {event.seq} comes after the end of the run"
        yield from self._count(event)
        self._last = event

    def _count(self, event: AnyEvent) -> Iterator[str]:
        if isinstance(event, Resumed):
            self._ledger = None  # What is void cannot be told from here; `asyncrl ledger` folds what counts.
        if self._ledger is not None:
            try:
                self._ledger.apply(event)
            except ValueError as error:
                yield f"event {event.seq}: {error}"

    def at_end(self) -> Iterator[str]:
        if self._last is None:
            yield "the log is empty"
        elif not isinstance(self._last, RunEnded):
            yield f"the log breaks off after event {self._last.seq}; the run did not say how it ended"
