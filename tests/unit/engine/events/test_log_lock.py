"""A log has one writer: a second is refused before it touches the files; readers and a dead writer stop nobody."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.lock import LogLock
from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.types import SCHEMA, RunEnded, RunStarted


def opened(folder: Path, *, threaded: bool = False) -> EventLog:
    return EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=folder / "events.jsonl", threaded=threaded)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path, threaded: bool) -> None:
    """Not even the last line, which looks torn while the first writer is at it."""
    path = tmp_path / "events.jsonl"
    first = opened(tmp_path, threaded=threaded)
    path.write_bytes(b'{"type":"run_st')
    with pytest.raises(
        TraceError, match=rf"log in {tmp_path} is being written by process {os.getpid()} on .*--run-dir"
    ):
        opened(tmp_path, threaded=threaded)
    assert path.read_bytes() == b'{"type":"run_st'
    assert list(read_events(tmp_path)) == []
    first.close()
    first.close()
    second = opened(tmp_path)
    second.append(RunEnded(code=0, reason="done"))
    second.close()
    assert [event.seq for event in read_events(tmp_path)] == [1]


def test_what_cannot_be_opened_keeps_no_lock(tmp_path: Path) -> None:
    line = msgspec.json.encode(RunStarted(seq=1, schema=SCHEMA + 1, config={}, software={})) + b"\n"
    (tmp_path / "events.jsonl").write_bytes(line)
    with pytest.raises(TraceError):
        opened(tmp_path)
    LogLock(tmp_path / "events.jsonl").release()


HOLD = """
import sys
from pathlib import Path
from asyncrl.engine.events.lock import LogLock
lock = LogLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(30)
def test_a_killed_writer_s_log_is_free_at_once(tmp_path: Path) -> None:
    """SIGKILL runs nothing of the process; the kernel alone gives the lock back."""
    path = tmp_path / "events.jsonl"
    command, pipe = [sys.executable, "-c", HOLD, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(TraceError, match=f"by process {process.pid} on "):
            opened(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    opened(tmp_path).close()
