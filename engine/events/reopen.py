"""Repairs an existing log so that a writer can continue it.

Invariant: no whole line is lost. A torn last line and half-written compressed files are removed; segments that the
index lacks are added to it.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.segments import FILE_NAME, Segment, read_lines, segment_files
from asyncrl.engine.events.types import UNREADABLE, check_schema


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log: number and time of its last event. The growing file begins with event `first`, 0 if empty."""

    seq: int = 0
    t: float = 0.0
    first: int = 0
    bytes: int = 0
    segments: tuple[Segment, ...] = ()


class _Any(msgspec.Struct):
    """The fields that every event has, and the schema, which `run_started` has."""

    seq: int
    t: float
    schema: int = 0


@dataclass(slots=True)
class _File:
    """Event numbers, last time and size of the whole lines of one file."""

    path: Path
    first: int = 0
    last: int = 0
    t: float = 0.0
    bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> "_File":
        """Read a file to its end; TraceError if its last line is not an event, or its schema is newer."""
        file, last = cls(path), b""
        for line in read_lines(path):
            file.bytes += len(line)
            if not last:
                file.first = _event(path, line).seq
            elif b'"run_started"' in line:
                _event(path, line)
            last = line
        if last:
            end = _event(path, last)
            file.last, file.t = end.seq, end.t
        return file


def _event(path: Path, line: bytes) -> _Any:
    try:
        event = msgspec.json.decode(line, type=_Any)
    except UNREADABLE as error:
        raise TraceError(f"{path.name} has a line that is not an event: {error}") from error
    check_schema(event.schema)
    return event


def reopen(growing: Path) -> Tail:
    """Repair the files of a log and return its tail; an empty tail if there is no log yet.

    TraceError if the schema is newer than the one that this asyncrl writes, or if the last line is not an event.
    """
    folder = growing.parent
    try:
        files = segment_files(folder) if growing.name == FILE_NAME else [growing] if growing.exists() else []
    except FileNotFoundError:
        return Tail()
    for part in folder.glob(f"{growing.stem}*.part"):
        part.unlink()
    finished = [_File.read(path) for path in files if path != growing]
    last = _File.read(growing) if growing in files else _File(growing)
    if growing in files:
        with growing.open("r+b") as file:
            file.truncate(last.bytes)
    segments = tuple(Segment(file=f.path.name, first=f.first, last=f.last, bytes=f.bytes) for f in finished)
    end = last if last.first or not finished else finished[-1]
    return Tail(end.last, end.t, last.first, last.bytes, segments)
