"""A text file that a run writes to as it goes, and whose failure does not end whoever writes.

Where a disk is full or a terminal gone, logging and showing would otherwise raise in the middle of an act.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class Output:
    """Writes to `file` until that fails; `lost` is then told, once, and nothing more is written."""

    def __init__(self, file: TextIO, lost: Callable[[OSError], None]) -> None:
        self._file = file
        self._lost = lost
        self._open = True

    def write(self, text: str) -> int:
        # A text may have what UTF-8 cannot write, such as half of a surrogate pair.
        encoding = self._file.encoding or "utf-8"
        self._attempt(self._file.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        """Close the file; a last error of it is told too."""
        self._attempt(self._file.close)
        self._open = False

    def _attempt(self, call: Callable[..., Any], *args: Any) -> None:
        if self._open:
            try:
                call(*args)
            except OSError as error:
                self._open = False
                self._lost(error)

    def __getattr__(self, name: str) -> Any:
        # What a console asks of a file: whether it is a terminal, its encoding, its number.
        return getattr(self._file, name)


def standard_output() -> Output:
    """Return standard output; where its reader is gone it becomes a hole, or Python's own end fails to flush it."""

    def lost(_: OSError) -> None:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return Output(sys.stdout, lost)
