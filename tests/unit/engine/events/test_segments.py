"""Segments: finished by size, compressed, indexed; written in a thread as in place."""

import gzip
import json
from pathlib import Path

import pytest

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import EventLog, read_events
from asyncrl.engine.events.segments import Finisher, read_index, segment_files
from asyncrl.engine.events.types import AnyEvent, GroupFailed, RunEnded
from asyncrl.engine.events.writer import FileWriter, ThreadedWriter


def write(folder: Path, count: int, *, threaded: bool, segment_bytes: int = 2000, flush_every: int = 7) -> None:
    folder.mkdir(exist_ok=True)
    log = EventLog(
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        path=folder / "events.jsonl",
        threaded=threaded,
        segment_bytes=segment_bytes,
    )
    for number in range(count):
        log.append(GroupFailed(group=number, reason="timeout", error="x" * (number % 50)))
        if number % flush_every == 0:
            log.flush()
    log.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_segments_hold_every_event_once_and_in_order(tmp_path: Path, threaded: bool) -> None:
    write(tmp_path, 300, threaded=threaded)
    events = list(read_events(tmp_path))
    assert [event.seq for event in events] == list(range(1, 301))
    assert [event.group for event in events if isinstance(event, GroupFailed)] == list(range(300))
    names = [path.name for path in segment_files(tmp_path)]
    assert len(names) > 5
    assert names[0] == "events-000001.jsonl.gz"
    assert names[-1] == "events.jsonl"
    assert all(name.endswith(".jsonl.gz") for name in names[:-1])


@pytest.mark.parametrize("threaded", [False, True])
def test_the_index_says_which_numbers_stand_in_which_segment(tmp_path: Path, threaded: bool) -> None:
    write(tmp_path, 300, threaded=threaded)
    index = json.loads((tmp_path / "events.index.json").read_text())
    assert index["format"] == 1
    expected = 1
    for segment in index["segments"]:
        numbers = [event.seq for event in read_events(tmp_path / segment["file"])]
        assert numbers == list(range(segment["first"], segment["last"] + 1))
        assert segment["first"] == expected
        assert segment["bytes"] == len(gzip.decompress((tmp_path / segment["file"]).read_bytes())) >= 2000
        expected = segment["last"] + 1


def test_a_thread_writes_the_bytes_that_are_written_in_place(tmp_path: Path) -> None:
    for name, threaded in (("here", False), ("there", True)):
        write(tmp_path / name, 5000, threaded=threaded, segment_bytes=1 << 30)
    assert (tmp_path / "here" / "events.jsonl").read_bytes() == (tmp_path / "there" / "events.jsonl").read_bytes()


def test_a_small_log_is_one_file_and_has_no_index(tmp_path: Path) -> None:
    write(tmp_path, 20, threaded=True, segment_bytes=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_crash_between_compression_and_removal_leaves_each_event_once(tmp_path: Path) -> None:
    write(tmp_path, 100, threaded=False)
    packed = tmp_path / "events-000001.jsonl.gz"
    (tmp_path / "events-000001.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    (tmp_path / "events-000002.jsonl.gz.part").write_bytes(b"half")
    assert [event.seq for event in read_events(tmp_path)] == list(range(1, 101))


def test_a_crash_before_compression_leaves_a_readable_segment(tmp_path: Path) -> None:
    def not_yet(finisher: Finisher, path: Path) -> None:
        pass

    writer = FileWriter(tmp_path / "events.jsonl", segment_bytes=500, compress=not_yet)
    for number in range(1, 51):
        writer.write(RunEnded(seq=number, code=0, reason="done"))
    writer.close()
    assert (tmp_path / "events-000001.jsonl").exists()
    assert [event.seq for event in read_events(tmp_path)] == list(range(1, 51))
    assert read_index(tmp_path).segments[0].file == "events-000001.jsonl"


def test_the_torn_last_line_of_the_growing_file_is_passed_over_behind_segments(tmp_path: Path) -> None:
    write(tmp_path, 101, threaded=False)
    growing = tmp_path / "events.jsonl"
    whole = growing.read_bytes()
    assert whole.count(b"\n") > 1
    growing.write_bytes(whole[:-3])
    assert [event.seq for event in read_events(tmp_path)] == list(range(1, 101))


def test_a_compressed_segment_that_breaks_off_or_is_damaged_is_named(tmp_path: Path) -> None:
    """It was whole when it was finished, so nothing of the log may be taken as read."""
    write(tmp_path, 100, threaded=False)
    packed = tmp_path / "events-000002.jsonl.gz"
    whole = packed.read_bytes()
    for broken in (whole[:-20], whole[:5], whole[:40] + b"\xff" * 40 + whole[80:], b"no gzip"):
        packed.write_bytes(broken)
        with pytest.raises(TraceError, match=r"events-000002\.jsonl\.gz is not a complete compressed file"):
            list(read_events(tmp_path))


def test_a_damaged_index_is_named_and_nothing_needs_it(tmp_path: Path) -> None:
    write(tmp_path, 100, threaded=False)
    (tmp_path / "events.index.json").write_bytes(b"{")
    with pytest.raises(TraceError, match=r"events\.index\.json is not a valid index"):
        read_index(tmp_path)
    assert len(list(read_events(tmp_path))) == 100
    write(tmp_path, 1, threaded=False)
    assert read_index(tmp_path).segments


def test_a_folder_without_a_log_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no event log"):
        list(read_events(tmp_path))


def test_what_the_thread_cannot_write_is_raised_in_the_caller(tmp_path: Path) -> None:
    class Odd:
        seq = 1

    writer = ThreadedWriter(tmp_path / "events.jsonl")
    odd: AnyEvent = Odd()  # type: ignore[assignment]
    writer.write(odd)
    with pytest.raises(OSError, match="could not be written"):
        writer.close()
    with pytest.raises(OSError, match="could not be written"):
        writer.write(RunEnded(code=0, reason="done"))


@pytest.mark.timeout(20)
def test_a_full_queue_makes_the_caller_wait_and_loses_nothing(tmp_path: Path) -> None:
    count = 150_000
    writer = ThreadedWriter(tmp_path / "events.jsonl")
    event = RunEnded(code=0, reason="done")
    for _ in range(count):
        writer.write(event)
    writer.close()
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == count
    assert writer.cpu_s > 0
