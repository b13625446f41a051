"""The files of an event log: one that grows, `events.jsonl`, and finished segments beside it.

Invariant: every line is in one segment, in order; a finished segment (`events-000001.jsonl`, with `.gz` once it is
compressed) never changes. `events.index.json` says which numbers are in which segment. It only saves time and can
always be rebuilt.
"""

import gzip
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.engine.bounds import read_bytes
from asyncrl.engine.errors import TraceError

FILE_NAME = "events.jsonl"
INDEX = "events.index.json"
_FINISHED = "events-??????.jsonl"
LONGEST_LINE = 64 << 20
"""Bytes of an event. The largest name all samples of a batch, in some fifty bytes each."""
LARGEST_SEGMENT = 160 << 20
"""Bytes of a compressed segment's lines: one is finished as soon as it has 64 MiB. A file of the same size can
hold a thousand times as much, if it was made for that."""
_LARGEST_INDEX = 16 << 20
"""Bytes. A segment takes a hundred."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One finished segment: its file, the numbers of its first and last event, and the bytes of its lines."""

    file: str
    first: int
    last: int
    bytes: int


class Index(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    segments: list[Segment] = []


def read_index(folder: Path) -> Index:
    """Return the index of a folder, or an empty one. TraceError if it is damaged."""
    path = folder / INDEX
    try:
        content = read_bytes(path, _LARGEST_INDEX, TraceError) if path.exists() else b"{}"
        return msgspec.json.decode(content, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{INDEX} is not a valid index: {error}; it can be deleted") from error


def segment_files(folder: Path) -> list[Path]:
    """List the files of a log in the order of their events; FileNotFoundError if there are none."""
    finished: dict[str, Path] = {}
    for path in (*folder.glob(f"{_FINISHED}.gz"), *folder.glob(_FINISHED)):
        # Both exist if a crash came between compression and removal. Their content is the same, so one is read.
        finished[path.name.removesuffix(".gz")] = path
    files = [finished[name] for name in sorted(finished)]
    if (folder / FILE_NAME).exists():
        files.append(folder / FILE_NAME)
    if not files:
        raise FileNotFoundError(f"{folder} holds no event log: neither {FILE_NAME} nor {_FINISHED}")
    return files


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of one file; a torn last line is ignored.

    TraceError for a compressed file that is damaged or breaks off: it was whole when it was finished. TraceError too
    for a line of more than LONGEST_LINE bytes, and a compressed file of more than LARGEST_SEGMENT.
    """
    packed, size = path.suffix == ".gz", 0
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), start=1):
                size += len(line)
                if len(line) > LONGEST_LINE:
                    raise TraceError(f"{path.name}, line {number}: it has more than {LONGEST_LINE:,} bytes")
                if packed and size > LARGEST_SEGMENT:
                    raise TraceError(f"{path.name}, line {number}: there are more than {LARGEST_SEGMENT:,} bytes")
                if line.endswith(b"\n"):
                    yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name} is not a complete compressed file: {error}") from error


class Finisher:
    """Turns the growing file into finished segments. `segments` are those that exist already."""

    def __init__(self, growing: Path, segments: Sequence[Segment] = ()) -> None:
        self._growing = growing
        self._segments = list(segments)
        # One thread names segments while another compresses; both write the index.
        self._lock = threading.Lock()
        if segments:
            self._write_index()

    def rename(self, first: int, last: int) -> Path:
        """Rename the growing file, which is complete and closed, to a numbered segment; return its path."""
        with self._lock:
            growing = self._growing
            number = 1 + max((int(segment.file.split(".")[0][-6:]) for segment in self._segments), default=0)
            path = growing.with_name(f"{growing.stem}-{number:06d}.jsonl")
            self._segments.append(Segment(file=path.name, first=first, last=last, bytes=growing.stat().st_size))
            growing.rename(path)
            self._write_index()
            return path

    def compress(self, path: Path) -> None:
        """Replace a finished segment by its compressed form. At every moment one of the two is complete."""
        packed, part = path.with_name(f"{path.name}.gz"), path.with_name(f"{path.name}.gz.part")
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        _sync(part)
        part.replace(packed)
        with self._lock:
            at = next(i for i, segment in enumerate(self._segments) if segment.file == path.name)
            self._segments[at] = msgspec.structs.replace(self._segments[at], file=packed.name)
            self._write_index()
        path.unlink()

    def _write_index(self) -> None:
        part = self._growing.with_name(f"{INDEX}.part")
        part.write_bytes(msgspec.json.encode(Index(segments=self._segments)) + b"\n")
        part.replace(self._growing.with_name(INDEX))


def _sync(path: Path) -> None:
    """Sync a file, so that the file that it replaces can be removed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
