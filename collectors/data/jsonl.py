"""JSONL: one JSON object per line, found by an index of where lines begin.

Invariant: opening a file looks at its bytes for line ends and decodes none of them.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import ConfigError, DataError

LONGEST_LINE = 64 << 20
_CHUNK_BYTES = 1 << 22
_NEWLINE, _RETURN = 10, 13
_MARK = b"\xef\xbb\xbf"
"""The byte order mark that some editors put before UTF-8."""


class JsonlFile:
    """The records of a JSONL file; empty lines are none. Memory: 8 bytes per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Read at an offset, not mapped: a file that somebody cuts short would end the process with a bus error.
        self._file = path.open("rb", buffering=0)
        self._starts, self._lines = _index(self._file)
        if not len(self):
            raise ConfigError(f"{path} holds no record")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def number(self, index: int) -> int:
        return (index if self._lines is None else int(self._lines[index])) + 1

    def place(self, index: int) -> str:
        return f"{self._path}, line {self.number(index)}"

    def read(self, index: int) -> Any:
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        line = os.pread(self._file.fileno(), end - start, start)
        try:
            return msgspec.json.decode(line.removeprefix(_MARK) if index == 0 else line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{self.place(index)} is not JSON: {error}") from None


def _index(file: Any) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return where the lines with content begin, with the file's size behind, and their numbers if others are empty.

    ConfigError names a line of more than LONGEST_LINE bytes.
    """
    buffer, size, starts, last = bytearray(_CHUNK_BYTES), 0, [np.zeros(1, np.int64)], 0
    while count := file.readinto(buffer):
        ends = np.flatnonzero(np.frombuffer(buffer, np.uint8, count) == _NEWLINE)
        starts.append(ends + (size + 1))
        size += count
        if size - last > LONGEST_LINE + _CHUNK_BYTES:  # Before the rest of a file of one line is looked at.
            break
        last = int(starts[-1][-1]) if len(ends) else last
    lines = np.concatenate(starts)
    if lines[-1] < size:  # The last line has no end.
        lines = np.append(lines, size)
    lengths = np.diff(lines)
    long = np.flatnonzero(lengths > LONGEST_LINE)
    if len(long):
        raise ConfigError(f"{file.name}, line {long[0] + 1} has more than {LONGEST_LINE:,} bytes, the most of a record")
    short = np.flatnonzero(lengths <= 2)
    empty = [at for at in short.tolist() if not os.pread(file.fileno(), int(lengths[at]), int(lines[at])).strip()]
    if not empty:
        return lines, None
    content = np.delete(np.arange(len(lengths)), empty)
    return np.append(lines[content], size), content
