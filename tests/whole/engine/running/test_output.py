"""Files that a run writes to as it goes: a failure is told once, and ends nobody who writes."""

import errno
import io
import json
import os
from pathlib import Path

import structlog

from asyncrl.engine.errors import NotWritten
from asyncrl.engine.running.logs import log_to
from asyncrl.engine.running.output import Output


class Full(io.StringIO):
    """A file on a disk that is full after `room` writes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, text: str) -> int:
        self._room -= 1
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_file_that_fails_is_told_of_once_and_raises_nothing() -> None:
    """FOUND-C11: logging goes on where the disk is full."""
    lost: list[OSError] = []
    file = Full(room=1)
    output = Output(file, lost.append)
    for text in ("kept", "lost", "lost"):
        output.write(text)
        output.flush()
    assert file.getvalue() == "kept"
    assert [error.errno for error in lost] == [errno.ENOSPC]


def test_a_text_that_has_no_encoding_is_escaped(tmp_path: Path) -> None:
    """FOUND-I10: half of a surrogate pair, in UTF-8 and in ASCII."""
    for encoding, words in (("utf-8", "é \\ud800"), ("ascii", "\\xe9 \\ud800")):
        with (tmp_path / encoding).open("w", encoding=encoding) as file:
            Output(file, lambda error: None).write("é \ud800")
        assert (tmp_path / encoding).read_text(encoding=encoding) == words


def test_log_records_with_such_texts_are_json(tmp_path: Path) -> None:
    """FOUND-I10: the log of a run, and its end where nothing fails."""
    lost: list[NotWritten] = []
    with log_to(tmp_path / "log.jsonl", lost=lost.append):
        structlog.get_logger().warning("sample failed", error="\udcff")
    (record,) = map(json.loads, (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines())
    assert (record["error"], lost) == ("\udcff", [])
