"""The event log: append-only, with one writer. Every fold sees each event as it is appended."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.engine.errors import NotWritten, TraceError
from asyncrl.engine.events.lock import LogLock
from asyncrl.engine.events.reopen import reopen
from asyncrl.engine.events.segments import FILE_NAME, read_lines, segment_files
from asyncrl.engine.events.types import (
    UNREADABLE,
    AnyEvent,
    EvaluationFailed,
    GroupFailed,
    OwnerDead,
    PublishFailed,
    Resumed,
    RunEnded,
    RunStarted,
    check_schema,
)
from asyncrl.engine.events.writer import SEGMENT_BYTES, FileWriter, ThreadedWriter, Writer

__all__ = ["FILE_NAME", "EventLog", "Fold", "effective_events", "fold_events", "located_events", "read_events"]


_TOLD = {
    GroupFailed: "error",
    OwnerDead: "error",
    PublishFailed: "error",
    EvaluationFailed: "error",
    Resumed: "cause",
    RunEnded: "reason",
}
"""The fields with what others' code raised, by type of event: it may say anything."""


class Fold(Protocol):
    """Anything that takes the events of a log one by one.

    A fold may have `kinds`, the types of events that it looks at; while a log is written it is given only those.
    """

    def apply(self, event: AnyEvent) -> None: ...


class EventLog:
    """Numbers events and hands them to `folds`; with a `path` it also writes them there.

    If the file cannot be written (a full disk), `on_failure` is called once and the folds still get all events,
    because ending the run appends more. Without `on_failure` the error is raised.

    A log that is there already is continued: numbers and times follow its last whole event, and a
    torn last line goes. TraceError if it is of a newer schema, or if another process, or another EventLog,
    is writing it. `threaded` writes in a thread of its own, off the critical path (not in
    virtual time), which puts lines in the file by itself; else `flush` does (each step). `close`, and a
    `Checkpointed` event, also sync them. What is over `segment_bytes` becomes a finished, compressed
    segment beside `path`. `redact` is given every error's text before it is logged.
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
        on_failure: Callable[[NotWritten], None] | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self._redact = redact
        self._on_failure = on_failure
        self._clock = clock
        self._wall = wall
        self._start = clock()
        self._folds = tuple(folds)
        # By type of event, because most types concern one fold or none.
        self._applies: dict[type, list[Callable[[Any], None]]] = {}
        self._path = path
        self._writer: Writer | None = None
        self._lock: LogLock | None = None
        self._seq = self._found = 0
        if path is not None:
            self._lock = LogLock(path)
            try:
                tail = reopen(path)
                self._seq = self._found = tail.seq
                self._start -= tail.t
                kind = ThreadedWriter if threaded else FileWriter
                self._writer = kind(path, tail=tail, segment_bytes=segment_bytes)
            except BaseException:
                self._lock.release()
                raise

    def add(self, fold: Fold) -> None:
        """Give every event from now on to `fold`."""
        self._folds = (*self._folds, fold)
        self._applies.clear()

    @property
    def now(self) -> float:
        """The log's time, seconds, as an event would have it that was appended now."""
        return round(self._clock() - self._start, 6)

    @property
    def seq(self) -> int:
        """The number of the last event."""
        return self._seq

    def wait_written(self, timeout_s: float) -> None:
        """Block until what was appended is on disk; NotWritten if it cannot be, or is not within `timeout_s`."""
        if self._writer is None or not self._writer.wait_written(timeout_s):
            raise NotWritten(f"{self._path} could not be written within {timeout_s:g} s")

    def append(self, event: AnyEvent) -> None:
        self._seq += 1
        event = msgspec.structs.replace(event, seq=self._seq, t=self.now, wall=round(self._wall(), 3))
        if self._redact is not None and type(event) in _TOLD:
            told = _TOLD[type(event)]
            event = msgspec.structs.replace(event, **{told: self._redact(getattr(event, told))})
        failed: OSError | None = None
        if self._writer is not None:
            try:
                self._writer.write(event)
            except OSError as error:
                failed = error
        kind = type(event)
        if kind not in self._applies:
            self._applies[kind] = [fold.apply for fold in self._folds if kind in getattr(fold, "kinds", (kind,))]
        for apply in self._applies[kind]:
            apply(event)
        if failed is not None:
            self._fail(failed)

    def resume(
        self,
        checkpoint: str,
        *,
        after: int,
        config: Mapping[str, Any] | None = None,
        attempt: int = 1,
        cause: str = "",
    ) -> None:
        """Continue from a checkpoint that holds everything up to event `after`; later events become void.

        The folds, which must be new, are given the events that count, then the `Resumed` event that says so, with the
        configuration from here on. ValueError if the log has no such event, or was appended to already.
        """
        if self._path is None or not 0 < after <= self._found:
            raise ValueError(
                f"cannot resume from event {after}; the log had events up to {self._found} when it was opened"
            )
        if self._seq != self._found:
            raise ValueError("cannot resume: something was already appended to this log")
        for event in effective_events(self._path if self._path.name != FILE_NAME else self._path.parent, up_to=after):
            for fold in self._folds:
                fold.apply(event)
        self.append(
            Resumed(checkpoint=checkpoint, after=after, config=dict(config or {}), attempt=attempt, cause=cause)
        )

    def flush(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except OSError as error:
                self._tell(error)
            finally:
                if self._lock is not None:
                    self._lock.release()

    def _fail(self, error: OSError) -> None:
        """Close the file, which ends with a torn line, and report the error."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError, ValueError):
                writer.close()
        if self._lock is not None:
            self._lock.release()
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        failure = error if isinstance(error, NotWritten) else NotWritten.of(self._path, error)
        if self._on_failure is None:
            raise failure from error
        self._on_failure(failure)

    @property
    def writer(self) -> Writer | None:
        """What writes the events to the file; None without a file."""
        return self._writer


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of a run folder, or of one file of its log, of this or any older schema.

    A torn last line is ignored. TraceError, with file and line, for any other bad line, a segment that breaks off,
    or a newer schema. FileNotFoundError if the log does not exist.
    """
    for _, event in located_events(path):
        yield event


def located_events(path: Path) -> Iterator[tuple[str, AnyEvent]]:
    """Yield events as `read_events` does, each with its place as text: `events.jsonl, line 7`."""
    decode = msgspec.json.Decoder(AnyEvent).decode
    for file in segment_files(path) if path.is_dir() else [path]:
        for number, line in enumerate(read_lines(file), start=1):
            where = f"{file.name}, line {number}"
            try:
                event: AnyEvent = decode(line)
            except UNREADABLE as error:
                _check_schema_of(line)
                raise TraceError(f"{where}: {error}") from error
            if isinstance(event, RunStarted):
                check_schema(event.schema)
            yield where, event


def _check_schema_of(line: bytes) -> None:
    """TraceError about the schema if a line that cannot be read starts a log of a newer schema."""
    try:
        schema = msgspec.json.decode(line).get("schema")
    except (*UNREADABLE, AttributeError):
        return
    if isinstance(schema, int):
        check_schema(schema)


def effective_events(path: Path, *, up_to: int | None = None) -> Iterator[AnyEvent]:
    """Yield the events that count: all but those that a later `Resumed` voided.

    With `up_to`: as if the log were resumed now from event `up_to`.
    """
    void = _void_numbers(path, up_to)
    for event in read_events(path):
        if not any(event.seq in numbers for numbers in void):
            yield event


def _void_numbers(path: Path, up_to: int | None) -> list[range]:
    """Return the numbers that resumes voided; a resume that is itself void has no effect."""
    decode = msgspec.json.Decoder(AnyEvent).decode
    void = [] if up_to is None else [range(up_to + 1, sys.maxsize)]
    for file in reversed(segment_files(path) if path.is_dir() else [path]):
        for line in reversed([line for line in read_lines(file) if b'"resumed"' in line]):
            try:
                event: AnyEvent = decode(line)
            except UNREADABLE:  # Reading the events will name this line.
                continue
            if isinstance(event, Resumed) and not any(event.seq in numbers for numbers in void):
                void.append(range(event.after + 1, event.seq))
    return void


def fold_events(path: Path, *folds: Fold) -> None:
    """Give the events that count to `folds`."""
    for event in effective_events(path):
        for fold in folds:
            fold.apply(event)
