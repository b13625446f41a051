"""Claims that end without a fate: what was given back, or reaped, is judged by a later claim. Logs written by hand."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    BatchJudged,
    BatchTaken,
    Checkpointed,
    Claimed,
    ClaimReturned,
    Dispatched,
    GroupFailed,
    Judged,
    OwnerDead,
    Planned,
    Put,
    Released,
    Resumed,
    RunEnded,
    RunStarted,
    Settled,
    StepEnded,
    StepStarted,
    digest,
    written,
)
from asyncrl.engine.testing.trace import script_config
from asyncrl.engine.trace.claims import judged_claims
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.engine.trace.validation import problems
from asyncrl.engine.trace.what_if import what_if
from asyncrl.filters.testing import make_group

MIXED, FLAT = (0.0, 1.0), (1.0, 1.0)


def arrived(group: int, rewards: Sequence[float], *, retry_of: int | None = None) -> list[AnyEvent]:
    made = make_group(rewards, group=group, version=0)
    return [
        Dispatched(group=group, prompt=group, dataset="d", size=2, collector="c", retry_of=retry_of),
        Put(group=group, keys=list(made.keys), tags=written(made.tags), digest=digest(made.tags)),
    ]


def claimed(*groups: int) -> Claimed:
    return Claimed(claim="driver/0", fence=1, groups=list(groups))


def judged(group: int, rewards: Sequence[float], *, batch: int, age: int = 0) -> list[AnyEvent]:
    """A verdict; a flat group is dropped, and so has its fate."""
    flat = rewards == FLAT
    made = make_group(rewards, group=group, version=0)
    verdict = Judged(
        group=group,
        batch=batch,
        age=age,
        dropped="zero_std" if flat else None,
        by="zero_std" if flat else "",
        masked={},
        digest=digest(made.tags),
    )
    return [verdict, Settled(group=group, fates=["dropped:zero_std"] * 2)] if flat else [verdict]


def complete(batch: int) -> BatchJudged:
    return BatchJudged(batch=batch, judged=2, kept=1, attempts=1, reward_sum=3.0, reward_count=4)


def step(number: int, group: int, *, batch: int) -> list[AnyEvent]:
    keys = [f"v0_p{group}_g0", f"v0_p{group}_g1"]
    lengths = sum(make_group(MIXED, group=group, version=0).response_tokens)
    return [
        BatchTaken(batch=batch),
        Planned(batch=batch, step=number, ranks=[[keys]], fillers=0),
        StepStarted(step=number, version=number - 1, groups=[group]),
        StepEnded(
            step=number,
            version=number,
            seconds=1.0,
            ages={str(number - 1): 2},
            samples=2,
            tokens=lengths,
            reward_sum=1.0,
            metrics={},
        ),
        Settled(group=group, fates=["trained", "trained"]),
        Acknowledged(generator="c", version=number),
    ]


def log_of(*parts: AnyEvent | list[AnyEvent]) -> Recording:
    """Number events as a run would."""
    config = script_config([], groups_per_step=2, max_staleness=2)
    events: list[AnyEvent] = [RunStarted(schema=2, config=config.model_dump(), software={})]
    for part in parts:
        events += part if isinstance(part, list) else [part]
    events.append(RunEnded(code=0, reason="data exhausted"))
    return Recording([msgspec.structs.replace(event, seq=i, t=float(i)) for i, event in enumerate(events, start=1)])


ENDS: list[AnyEvent] = [ClaimReturned(groups=[2]), OwnerDead(owner="driver", groups=[2])]
FIRST = [*arrived(0, MIXED), *arrived(1, FLAT), *arrived(2, MIXED), *arrived(3, FLAT)]
FIRST_STEP = [claimed(0, 1), *judged(0, MIXED, batch=0), *judged(1, FLAT, batch=0), complete(0), *step(1, 0, batch=0)]
SECOND = [*judged(2, MIXED, batch=1, age=1), *judged(3, FLAT, batch=1, age=1), complete(1), *step(2, 2, batch=1)]


@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize(
    "before_step",
    [
        pytest.param([claimed(2)], id="not judged yet"),
        pytest.param([claimed(2), *judged(2, MIXED, batch=1, age=1)], id="judged in a batch that was not complete"),
    ],
)
def test_a_group_that_is_ready_again_is_judged_by_its_next_claim(ended: AnyEvent, before_step: list[AnyEvent]) -> None:
    """It is compared at each of its verdicts."""
    recording = log_of(FIRST, FIRST_STEP, before_step, ended, claimed(2, 3), SECOND)
    replayed = replay(recording)
    assert replayed.difference is None
    assert [event.groups for event in replayed.events if isinstance(event, StepStarted)] == [[0], [2]]
    assert prove(recording.events).faults() == []
    last = max(place for place, event in enumerate(recording.events) if isinstance(event, Judged) and event.group == 2)
    events = list(recording.events)
    events[last] = msgspec.structs.replace(events[last], age=2)
    found = replay(Recording(events)).difference
    assert found is not None
    assert (found.seq, found.why) == (events[last].seq, "age is 2 in the log, 1 in the replay")


def test_a_claim_of_which_a_part_came_back_brought_the_rest() -> None:
    recording = log_of(
        FIRST,
        FIRST_STEP,
        claimed(2, 3),
        ClaimReturned(groups=[2]),
        judged(3, FLAT, batch=1, age=1),
        claimed(2),
        judged(2, MIXED, batch=1, age=1),
        complete(1),
        step(2, 2, batch=1),
    )
    assert [(claim.batch, claim.groups) for claim in judged_claims(recording.events).values()] == [
        (0, [0, 1]),
        (1, [3]),
        (1, [2]),
    ]
    assert replay(recording).difference is None


@pytest.mark.parametrize(
    ("under_way", "batch"),
    [
        pytest.param([claimed(2), *judged(2, MIXED, batch=1, age=1)], 1, id="a batch half judged"),
        pytest.param([claimed(4), *judged(4, FLAT, batch=1, age=1)], 1, id="a batch half judged and dropped"),
        pytest.param(
            [claimed(2, 4), *judged(2, MIXED, batch=1, age=1), *judged(4, FLAT, batch=1, age=1), complete(1)],
            2,
            id="a batch complete",
        ),
        pytest.param(
            [
                claimed(2, 4),
                *judged(2, MIXED, batch=1, age=1),
                *judged(4, FLAT, batch=1, age=1),
                complete(1),
                BatchTaken(batch=1),
            ],
            2,
            id="a batch taken",
        ),
    ],
)
def test_a_resumed_run_replays_what_counts(under_way: list[AnyEvent], batch: int) -> None:
    """At the checkpoint a batch was under way; group 3 was in flight, and is lost with its collector."""
    held = [2] if any(2 in event.groups for event in under_way if isinstance(event, Claimed)) else []
    before = log_of(
        [event for event in FIRST if not (isinstance(event, Put) and event.group == 3)],
        arrived(4, FLAT),
        FIRST_STEP,
        under_way,
        Checkpointed(path="c/1", version=1),
    ).events[1:-1]
    recording = log_of(
        list(before),
        # Void: another batch was judged, and the run died.
        arrived(6, FLAT),
        claimed(6),
        judged(6, FLAT, batch=batch, age=1),
        Resumed(checkpoint="c/1", after=len(before) + 1),
        OwnerDead(owner="driver", groups=held),
        GroupFailed(group=3, reason="collector_lost", error=""),
        Settled(group=3, fates=["failed:collector_lost"] * 2),
        arrived(5, FLAT, retry_of=6),
        claimed(2, 5),
        judged(2, MIXED, batch=batch, age=1),
        judged(5, FLAT, batch=batch, age=1),
        complete(batch),
        step(2, 2, batch=batch),
        [] if any(isinstance(e, Settled) for e in under_way) else [claimed(4), *judged(4, FLAT, batch=2, age=2)],
        Released(groups=[2, 5]),
    )
    counts = effective(recording)
    replayed = replay(counts)
    assert replayed.difference is None
    assert [event.groups for event in replayed.events if isinstance(event, StepStarted)] == [[0], [2]]
    assert prove(counts.events).faults() == []


def test_a_what_if_has_a_group_where_it_was_claimed_last_and_counts_it_once() -> None:
    recording = log_of(
        FIRST,
        FIRST_STEP,
        claimed(2),
        judged(2, MIXED, batch=1, age=1),
        OwnerDead(owner="driver", groups=[2]),
        claimed(3),
        judged(3, FLAT, batch=1, age=1),
        claimed(2),
        judged(2, MIXED, batch=1, age=1),
        complete(1),
        step(2, 2, batch=1),
    )
    assert replay(recording).difference is None
    answer = what_if(recording, recording.config())
    assert [event.group for event in answer.events if isinstance(event, Judged)] == [0, 1, 3, 2]
    assert answer.after.lines() == answer.before.lines()
    assert answer.before.judged == 4


def effective(recording: Recording) -> Recording:
    """Leave out what the log's resumes made void, as reading it from a file does."""
    void = [range(event.after + 1, event.seq) for event in recording.events if isinstance(event, Resumed)]
    return Recording([event for event in recording.events if not any(event.seq in numbers for numbers in void)])


def test_validation_follows_claims_that_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_log(path, log_of(FIRST, FIRST_STEP, claimed(2), ENDS[0], claimed(2, 3), SECOND).events)
    assert list(problems(path)) == []
    write_log(path, log_of(FIRST, FIRST_STEP, ENDS[0], claimed(2, 3), SECOND).events)
    assert any("group 2 cannot become ready again" in problem for problem in problems(path))
