"""The traces in tests/traces: each replays, and together they have all that a replay must follow."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.types import (
    AnyEvent,
    BatchJudged,
    BatchTaken,
    Claimed,
    Dispatched,
    Judged,
    OwnerDead,
    Planned,
    Put,
    Settled,
    StepEnded,
    StepStarted,
    WorkGiven,
)
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import Replayed, replay

TRACES = sorted((Path(__file__).parents[3] / "traces").glob("*.jsonl"))
NAMES = [path.stem for path in TRACES]
SCRIPT = Path(__file__).parents[4] / "scripts" / "record_traces.py"
OLD = {"schema-1": 1, "ray-reverse": 2}


@cache
def recording(name: str) -> Recording:
    return Recording.read(TRACES[NAMES.index(name)])


@cache
def replayed(name: str) -> Replayed:
    return replay(recording(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_replays(name: str) -> None:
    """FOUND-L3: whatever the product decides otherwise, one of them differs."""
    assert replayed(name).difference is None


def of(recording: Recording, kind: type[Any]) -> list[Any]:
    return [event for event in recording.events if isinstance(event, kind)]


def fates(recording: Recording) -> set[str]:
    return {fate for event in of(recording, Settled) for fate in event.fates}


def during(recording: Recording, kind: type[Any]) -> Iterator[AnyEvent]:
    """Yield events between a step's begin and its end."""
    training = False
    for event in recording.events:
        training = isinstance(event, StepStarted) or (training and not isinstance(event, StepEnded))
        if training and isinstance(event, kind):
            yield event


def gate_held(recording: Recording) -> bool:
    """Whether in mode `gate` a whole batch's groups lay there, and nothing was claimed until a later one came."""
    buffered, waited, size = set[int](), False, recording.config().rollout.groups_per_step
    free = True
    for event in recording.events:
        match event:
            case Put():
                waited = waited or (free and len(buffered) >= size)
                buffered.add(event.group)
            case Claimed():
                buffered -= set(event.groups)
                free = False
            case BatchTaken():
                free = True
    return waited and recording.config().rollout.stale_mode == "gate"


def owners_lost_claims(recording: Recording) -> bool:
    """Whether groups of a dead owner's claim were claimed again, and trained."""
    lost = {group for event in of(recording, OwnerDead) for group in event.groups}
    claims = [group for event in of(recording, Claimed) for group in event.groups]
    trained = {event.group for event in of(recording, Settled) if "trained" in event.fates}
    return any(claims.count(group) > 1 and group in trained for group in lost)


def masks(reason: str) -> Callable[[Recording], bool]:
    return lambda recording: f"masked:{reason}" in fates(recording)


COVERED: dict[str, Callable[[Recording], Any]] = {
    "two ranks": lambda r: any(len(event.ranks) == 2 for event in of(r, Planned)),
    "several updates": lambda r: any(len(event.updates) > 1 for event in of(r, Planned)),
    "a filler": lambda r: any(event.fillers for event in of(r, Planned)),
    "samples trained at an age": lambda r: any(set(event.ages) - {"0"} for event in of(r, StepEnded)),
    "stale drops": lambda r: "dropped:stale" in fates(r),
    "cancelled groups": lambda r: "dropped:cancelled_stale" in fates(r),
    "prompts that come again": lambda r: any(event.retry_of is not None for event in of(r, Dispatched)),
    "prompts of a second epoch": lambda r: (
        len({event.prompt for event in of(r, Dispatched)}) < sum(event.retry_of is None for event in of(r, Dispatched))
    ),
    "refill": lambda r: any(event.judged > event.kept >= 3 for event in of(r, BatchJudged)),
    "verdicts while a step runs": lambda r: list(during(r, Judged)),
    "claims while a step runs": lambda r: list(during(r, Claimed)),
    "masks by budget": masks("over_budget"),
    "masks by importance": masks("importance_outliers"),
    "failed groups": lambda r: "failed:generation_error" in fates(r),
    "a gate that held": gate_held,
    "a dead owner whose groups were claimed again": owners_lost_claims,
    "a dead actor that ended its run": lambda r: r.ended is not None and r.ended.code == 1 and of(r, OwnerDead),
    "the end of the data": lambda r: r.ended is not None and r.ended.reason == "data exhausted",
    "all three stages": lambda r: (
        {event.stage for event in of(r, WorkGiven)} == {"logprobs", "reference_logprobs", "train"}
    ),
}


@pytest.mark.parametrize("what", COVERED)
def test_the_traces_have_what_a_replay_must_follow(what: str) -> None:
    """FOUND-L3: they had one rank, no staleness, and no verdict while a step ran."""
    assert any(COVERED[what](recording(name)) for name in NAMES if name not in OLD)


def works(name: str) -> Iterable[Any]:
    return (work for rank in replayed(name).works for work in rank.values())


def test_the_traces_have_tokens_withheld_and_every_normalisation() -> None:
    """FOUND-L3: what reaches a rank beside the advantage."""
    assert any(any(sample.withheld for sample in work.samples.values()) for work in works("tokens"))
    assert any({sample.scale for sample in work.samples.values()} - {1.0, None} for work in works("overlap"))
    how = {recording(name).config().trainer.loss_normalisation for name in NAMES}
    assert how == {"token_mean", "sequence_mean", "constant"}


def test_old_schemas_have_their_witnesses_and_no_trace_is_large() -> None:
    """FOUND-L3: the log from Ray said that its task was another one."""
    schemas = {name: recording(name).started.schema for name in NAMES}
    assert {name: schema for name, schema in schemas.items() if schema < 3} == OLD
    assert recording("ray-reverse").started.config["task"]["name"] == "reverse"
    assert max(path.stat().st_size for path in TRACES) < 200_000


def test_the_script_makes_every_other_trace_the_same_each_time(tmp_path: Path) -> None:
    """FOUND-L3: scripts/record_traces makes them anew, to other decisions if the product makes others."""
    spec = importlib.util.spec_from_file_location("record_traces", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["record_traces"] = script
    spec.loader.exec_module(script)
    assert {*script.RECORDED, *OLD} == set(NAMES)
    for place in ("first", "second"):
        write_log(tmp_path / place, script.record("overlap"))
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert replay(Recording.read(tmp_path / "first")).difference is None
