"""Slices and anonymous copies of logs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, Claimed, Dispatched, GroupFailed, Judged, OwnerDead, Put, RunStarted
from asyncrl.engine.trace.cutting import Cut, anonymised, groups_of, write_log
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.engine.trace.validation import problems

Record = Callable[..., Recording]


def test_a_slice_keeps_what_is_inside_its_bounds_and_the_first_event(record: Record) -> None:
    events = record().events
    kept = [event for event in events if Cut(first=10, last=20).keeps(event)]
    assert [event.seq for event in kept] == [0, *range(10, 21)]
    kept = [event for event in events if Cut(types=frozenset({"judged", "put"})).keeps(event)]
    assert {type(event) for event in kept} == {RunStarted, Judged, Put}
    kept = [event for event in events if Cut(groups=frozenset({2})).keeps(event)]
    assert all(2 in groups_of(event) for event in kept[1:])
    assert [e.seq for e in kept[1:]] == [e.seq for e in events if 2 in groups_of(e)]


def test_a_written_slice_reads_back_as_it_was(record: Record, tmp_path: Path) -> None:
    events = record().events
    path = tmp_path / "slice.jsonl"
    assert write_log(path, events[5:30]) == 25
    assert list(read_events(path)) == list(events[5:30])


def with_secrets(event: AnyEvent) -> AnyEvent:
    """Put the word into whatever an anonymous log must not show."""
    changes: dict[str, Any] = {"wall": event.wall + 1.7e9}
    match event:
        case RunStarted():
            config = {**event.config, "run": {**event.config["run"], "directory": "/home/secret"}}
            config["task"] = {**config["task"], "name": "secret_task:Task", "options": {"key": "secret"}}
            changes |= {"config": config, "software": {"asyncrl": "secret"}, "process_wall": 1e9}
        case Put():
            changes |= {"tags": {**event.tags, "note": "secret"}, "digest": None}
        case Judged():
            changes["digest"] = None
    return msgspec.structs.replace(event, **changes)


def test_an_anonymous_log_tells_nothing_and_replays_to_the_same_decisions(record: Record, tmp_path: Path) -> None:
    recording = record(filters=[{"name": "staleness", "max_age_by_dataset": {"fake": 1}}, {"name": "zero_std"}])
    tainted = [with_secrets(event) for event in recording.events]
    out = list(anonymised(tainted))
    path = tmp_path / "events.jsonl"
    write_log(path, out)
    text = path.read_text()
    for word in ("secret", "fake", "driver", "went wrong", "17000000"):
        assert word not in text
    assert any(isinstance(event, GroupFailed) and event.error == "" for event in out)
    assert "dataset0" in text
    replayed = replay(Recording(out))
    assert replayed.difference is None
    verdicts = [(e.group, e.dropped) for e in recording.events if isinstance(e, Judged)]
    assert [(e.group, e.dropped) for e in replayed.events if isinstance(e, Judged)] == verdicts
    assert list(problems(path)) == []


def test_one_name_stays_one_name(record: Record) -> None:
    recording = record()
    pairs = {
        (old.collector, new.collector)
        for old, new in zip(recording.events, anonymised(recording.events), strict=True)
        if isinstance(old, Dispatched) and isinstance(new, Dispatched)
    }
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs}) == 2


def test_a_collector_that_died_has_the_name_of_its_groups_and_why_it_died_is_not_told() -> None:
    events: list[AnyEvent] = [
        Dispatched(seq=1, group=0, prompt=0, dataset="math", size=2, collector="secret"),
        Claimed(seq=2, claim="driver-7/0", fence=1, groups=[]),
        OwnerDead(seq=3, owner="secret", groups=[], error="OSError: /home/somebody"),
        OwnerDead(seq=4, owner="driver-7", groups=[]),
    ]
    sent, claimed, collector, driver = anonymised(events)
    assert isinstance(sent, Dispatched)
    assert isinstance(claimed, Claimed)
    assert isinstance(collector, OwnerDead)
    assert isinstance(driver, OwnerDead)
    assert (collector.owner, collector.error) == (sent.collector, "")
    assert f"{driver.owner}/0" == claimed.claim


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda events: events[1:], "the log begins with"),
        (lambda events: [*events[:5], *events[6:]], "event 6 follows event 4"),
        (lambda events: events[:-1], "the log breaks off after event"),
        (
            lambda events: [*events[:9], msgspec.structs.replace(events[9], t=-1.0), *events[10:]],
            "its time -1.0 is before",
        ),
        (
            lambda events: [*events[:-1], msgspec.structs.replace(events[-1], t=events[-2].t - 0.001)],
            "is before that of the event before it",
        ),
        (
            lambda events: [*events, msgspec.structs.replace(events[-2], seq=events[-1].seq + 1)],
            "after the end of the run",
        ),
        (lambda events: [], "the log is empty"),
        (
            lambda events: [
                msgspec.structs.replace(e, tags={**e.tags, "x": 1}) if isinstance(e, Put) else e for e in events
            ],
            "the digest differs",
        ),
        (lambda events: [e for e in events if not isinstance(e, Put)], "cannot go from in_flight to claimed"),
    ],
)
def test_validation_names_what_is_wrong(
    record: Record, tmp_path: Path, change: Callable[..., list[object]], problem: str
) -> None:
    events = record().events
    path = tmp_path / "events.jsonl"
    write_log(path, events)
    assert list(problems(tmp_path)) == []
    write_log(path, change(list(events)))  # type: ignore[arg-type]
    assert any(problem in found for found in problems(path))


def test_validation_says_which_line_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type":"unheard_of"}\n')
    [found] = problems(path)
    assert found.startswith("events.jsonl, line 1:")


def test_a_segment_that_the_index_names_and_nobody_has_is_missed(record: Record, tmp_path: Path) -> None:
    write_log(tmp_path / "events.jsonl", record().events)
    index = b'{"format":1,"segments":[{"file":"events-000001.jsonl.gz","first":1,"last":2,"bytes":3}]}'
    (tmp_path / "events.index.json").write_bytes(index)
    assert any("events-000001.jsonl.gz, which is not there" in found for found in problems(tmp_path))
