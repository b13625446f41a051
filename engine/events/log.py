"""The event log: one writer, append only; every fold sees each event as it is written."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.engine.events.segments import FILE_NAME, read_lines, segment_files
from asyncrl.engine.events.types import SCHEMA, AnyEvent, Resumed, RunStarted
from asyncrl.engine.events.writer import SEGMENT_BYTES, FileWriter, ThreadedWriter, Writer

__all__ = ["FILE_NAME", "EventLog", "Fold", "effective_events", "fold_events", "read_events"]


class Fold(Protocol):
    """Something that an event log folds into."""

    def apply(self, event: AnyEvent) -> None: ...


class EventLog:
    """Numbers events and hands them to `folds`; with a `path` it also writes them there.

    `threaded` writes in a thread of its own, off the critical path (not in virtual time). `flush`
    puts lines in the file (each step), `close` also syncs them. What is over `segment_bytes`
    becomes a finished, compressed segment beside `path`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        folds: Sequence[Fold] = (),
        path: Path | None = None,
        threaded: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._start = clock()
        self._apply = tuple(fold.apply for fold in folds)
        self._writer: Writer | None = None
        if path is not None:
            kind = ThreadedWriter if threaded else FileWriter
            self._writer = kind(path, segment_bytes=segment_bytes)
        self._seq = 0

    def append(self, event: AnyEvent) -> None:
        self._seq += 1
        event = msgspec.structs.replace(
            event, seq=self._seq, t=round(self._clock() - self._start, 6), wall=round(self._wall(), 3)
        )
        if self._writer is not None:
            self._writer.write(event)
        for apply in self._apply:
            apply(event)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    @property
    def writer(self) -> Writer | None:
        """What puts events into the file; None without one."""
        return self._writer


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of a run folder, or of one file of its log, of this or any older schema.

    A torn last line is passed over; any other bad line raises DecodeError with file and line, as
    does a log of a newer schema. FileNotFoundError if there is no log.
    """
    decode = msgspec.json.Decoder(AnyEvent).decode
    for file in segment_files(path) if path.is_dir() else [path]:
        for number, line in enumerate(read_lines(file), start=1):
            try:
                event: AnyEvent = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                newer = _newer_schema(line)
                if newer:
                    raise msgspec.DecodeError(newer) from error
                raise msgspec.DecodeError(f"{file.name}, line {number}: {error}") from error
            if isinstance(event, RunStarted) and event.schema > SCHEMA:
                raise msgspec.DecodeError(_too_new(event.schema))
            yield event


def _too_new(schema: int) -> str:
    return f"the log has schema {schema}, and this asyncrl reads up to {SCHEMA}; read it with the asyncrl that wrote it"


def _newer_schema(line: bytes) -> str:
    """Say that a line is of a newer schema, if it starts a log of one."""
    try:
        schema = msgspec.json.decode(line).get("schema")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        return ""
    return _too_new(schema) if isinstance(schema, int) and schema > SCHEMA else ""


def effective_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events that count: all but those that a later `Resumed` made void."""
    void = _void_numbers(path)
    for event in read_events(path):
        if not any(event.seq in numbers for numbers in void):
            yield event


def _void_numbers(path: Path) -> list[range]:
    """Return the numbers that resumes made void; a void resume makes nothing void."""
    decode = msgspec.json.Decoder(AnyEvent).decode
    void: list[range] = []
    for file in reversed(segment_files(path) if path.is_dir() else [path]):
        for line in reversed([line for line in read_lines(file) if b'"resumed"' in line]):
            event: AnyEvent = decode(line)
            if isinstance(event, Resumed) and not any(event.seq in numbers for numbers in void):
                void.append(range(event.after + 1, event.seq))
    return void


def fold_events(path: Path, *folds: Fold) -> None:
    """Apply the events that count to `folds`."""
    for event in effective_events(path):
        for fold in folds:
            fold.apply(event)
