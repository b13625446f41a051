"""An existing log is continued: numbers, times, segments, and the remains of a killed writer."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.segments import read_index, segment_files
from asyncrl.engine.events.types import SCHEMA, AnyEvent, Checkpointed, GroupFailed, RunEnded, RunStarted
from asyncrl.engine.events.writer import FileWriter


def opened(path: Path, *, threaded: bool = False, start: float = 100.0, segment_bytes: int = 1 << 20) -> EventLog:
    """A log on a clock that goes on by a second a look."""
    clock = iter(range(1_000_000))
    return EventLog(
        clock=lambda: start + next(clock),
        wall=lambda: 0.0,
        path=path,
        threaded=threaded,
        segment_bytes=segment_bytes,
    )


def write(path: Path, count: int, *, threaded: bool = False, segment_bytes: int = 1 << 20) -> None:
    log = opened(path, threaded=threaded, segment_bytes=segment_bytes)
    for number in range(count):
        log.append(GroupFailed(group=number, reason="timeout", error="x" * (number % 50)))
    log.close()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("segment_bytes", [1 << 20, 2000])
def test_an_existing_log_is_gone_on_with(tmp_path: Path, threaded: bool, segment_bytes: int) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(3):
        write(path, 70, threaded=threaded, segment_bytes=segment_bytes)
    events = list(read_events(tmp_path))
    assert [event.seq for event in events] == list(range(1, 211))
    assert [event.t for event in events] == [float(t) for t in range(1, 211)]
    expected = 1
    for segment in read_index(tmp_path).segments:
        numbers = [event.seq for event in read_events(tmp_path / segment.file)]
        assert segment_bytes <= segment.bytes < segment_bytes + 200
        assert (segment.first, segment.last, numbers) == (expected, numbers[-1], list(range(expected, numbers[-1] + 1)))
        expected = segment.last + 1
    assert (len(read_index(tmp_path).segments) > 5) == (segment_bytes == 2000)


def test_a_torn_last_line_goes_before_the_next_event_comes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 5)
    path.write_bytes(path.read_bytes()[:-7])
    write(path, 2)
    assert [event.seq for event in read_events(path)] == [1, 2, 3, 4, 5, 6]
    path.write_bytes(b'{"type":"run_st')
    write(path, 1)
    assert [event.seq for event in read_events(path)] == [1]


def test_a_log_of_a_newer_schema_is_not_written_to(tmp_path: Path) -> None:
    """Neither where its first event says so, nor where one in the middle does, since a newer asyncrl resumed it."""
    path = tmp_path / "events.jsonl"
    newer = msgspec.json.encode(RunStarted(seq=1, schema=SCHEMA + 1, config={}, software={})) + b"\n"
    write(tmp_path / "plain.jsonl", 3)
    plain = (tmp_path / "plain.jsonl").read_bytes()
    for lines in (newer, newer + plain, plain + newer + plain):
        path.write_bytes(lines)
        with pytest.raises(TraceError, match=f"schema {SCHEMA + 1}, and this asyncrl reads up to {SCHEMA}"):
            opened(path)
        assert path.read_bytes() == lines


def test_a_file_that_is_no_log_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"my notes\n")
    with pytest.raises(TraceError, match=r"events\.jsonl has a line that is not an event"):
        opened(path)
    assert path.read_bytes() == b"my notes\n"


def test_what_a_crash_left_of_segments_is_brought_in_order(tmp_path: Path) -> None:
    """One is not compressed, one is compressed and still there, one half compressed; the index lacks them all."""
    path = tmp_path / "events.jsonl"
    writer = FileWriter(path, segment_bytes=1000, compress=lambda finisher, path: None)
    for number in range(1, 91):
        writer.write(RunEnded(seq=number, t=float(number), code=0, reason="done"))
    writer.close()
    plain = tmp_path / "events-000002.jsonl"
    plain.with_name("events-000002.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "events-000099.jsonl.gz.part").write_bytes(b"half")
    (tmp_path / "events.index.json").unlink()
    path.unlink()  # The crash came before the next file was begun.
    last = read_last(tmp_path)
    opened(path).close()
    assert read_index(tmp_path).segments[-1].last == last
    write(path, 30, segment_bytes=1000)
    assert [event.seq for event in read_events(tmp_path)] == list(range(1, last + 31))
    assert all(file.name.endswith(".gz") for file in segment_files(tmp_path)[:-1])
    assert [segment.file for segment in read_index(tmp_path).segments] == [
        file.name for file in segment_files(tmp_path)[:-1]
    ]
    assert not list(tmp_path.glob("*.part"))
    index = read_index(tmp_path)
    (tmp_path / "events.index.json").unlink()
    opened(path).close()
    assert read_index(tmp_path) == index


def read_last(folder: Path) -> int:
    return max(event.seq for event in read_events(folder))


KILLED = """
import sys, time
from pathlib import Path
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import GroupFailed
log = EventLog(clock=time.monotonic, wall=time.time, path=Path(sys.argv[1]), threaded=True, segment_bytes=200_000)
number = 0
while True:
    log.append(GroupFailed(group=number, reason="timeout", error="x" * (number % 500)))
    number += 1
"""


@pytest.mark.timeout(60)
def test_a_writer_that_is_killed_loses_no_whole_line_and_its_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    try:
        while not (tmp_path / "events-000002.jsonl.gz").exists():
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    groups = [event.group for event in read_events(tmp_path) if isinstance(event, GroupFailed)]
    assert groups == list(range(len(groups)))
    log = EventLog(clock=lambda: 7.0, wall=lambda: 0.0, path=path, threaded=True)
    log.append(RunEnded(code=1, reason="killed"))
    log.close()
    *before, end = read_events(tmp_path)
    assert len(before) == len(groups)
    assert (end.seq, end.t) == (len(groups) + 1, before[-1].t)
    assert isinstance(end, RunEnded)


def test_a_checkpoint_is_synced_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(path.read_bytes()))
    log = opened(path)
    events: list[AnyEvent] = [GroupFailed(group=0, reason="x", error=""), Checkpointed(path="c", version=0)]
    for event in events:
        log.append(event)
    assert [lines.count(b"\n") for lines in synced] == [2]
    log.close()
