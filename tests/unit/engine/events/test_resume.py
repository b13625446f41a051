"""What a resume makes void: folds count what comes before the checkpoint, and what comes after the resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.ledger import Ledger, Place
from asyncrl.engine.events.length_bias import LengthBias
from asyncrl.engine.events.log import EventLog, effective_events, fold_events
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import (
    AnyEvent,
    Checkpointed,
    Claimed,
    ClaimReturned,
    Dispatched,
    OwnerDead,
    Put,
    Resumed,
    RunEnded,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.simulate.timeline import Timeline
from asyncrl.engine.trace.conservation import Conservation
from asyncrl.engine.trace.report import RunReport


def write(path: Path, events: list[AnyEvent]) -> None:
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path)
    for event in events:
        log.append(event)
    log.close()


def dispatched(group: int, retry_of: int | None = None) -> Dispatched:
    return Dispatched(group=group, prompt=0, dataset="d", size=2, collector="c", retry_of=retry_of)


def life(group: int, *, step: int, retry_of: int | None = None) -> list[AnyEvent]:
    """Seven events: a group from dispatch to its step's end."""
    return [
        dispatched(group, retry_of),
        Put(group=group, keys=[f"v0_p{group}_g0", f"v0_p{group}_g1"], tags={"response_tokens": [3, 3]}),
        Claimed(claim="c", fence=1, groups=[group]),
        StepStarted(step=step, version=step - 1, groups=[group]),
        StepEnded(step=step, version=step, seconds=1, ages={"0": 2}, samples=2, tokens=6, reward_sum=1.0, metrics={}),
        Settled(group=group, fates=["trained", "trained"]),
    ]


def numbers(path: Path) -> list[int]:
    return [event.seq for event in effective_events(path)]


def test_folds_do_not_count_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Group 1 is trained after the checkpoint and lost in the crash; group 2 is its prompt again."""
    path = tmp_path / "events.jsonl"
    before = [*life(0, step=1), Checkpointed(path="c/1", version=1)]
    lost = life(1, step=2)
    write(path, [*before, *lost, Resumed(checkpoint="c/1", after=len(before)), *life(2, step=2, retry_of=1)])
    ledger, progress = Ledger(), Progress()
    fold_events(path, ledger, progress)
    assert (ledger.dispatched, ledger.trained, ledger.unsettled) == (4, 4, [])
    assert (progress.steps, progress.trained_tokens, progress.ages) == (2, 12, {0: 4})
    assert numbers(path) == [*range(1, 8), *range(14, 21)]


def before_and_after() -> tuple[list[AnyEvent], list[AnyEvent], list[AnyEvent]]:
    """What was before a checkpoint; what was lost; what the resumed run did, with the lost prompts issued again.

    At the checkpoint group 1 is claimed and group 2 in flight.
    """
    before = [*life(0, step=1), *life(1, step=2)[:3], dispatched(2), Checkpointed(path="c/1", version=1)]
    lost = [*life(1, step=2)[3:], *life(3, step=3), dispatched(4), Put(group=4, keys=[], tags={}), *ending()]
    after = [
        OwnerDead(owner="driver-1", groups=[1]),
        Settled(group=2, fates=["failed:collector_lost"] * 2),
        *life(1, step=2)[2:],
        *life(5, step=3, retry_of=3),
        *life(6, step=4, retry_of=4),
        *ending(),
    ]
    return before, lost, after


def ending() -> list[AnyEvent]:
    return [RunEnded(code=0, reason="done")]


def ledger(fold: Ledger) -> object:
    return fold.summary(), fold.unsettled


def conservation(fold: Conservation) -> object:
    return fold.fates, fold.samples, fold.faults(), fold.ended


def progress(fold: Progress) -> object:
    return fold.steps, fold.trained_tokens, fold.generated_tokens, fold.ages, fold.rewards.recent(5)


def length_bias(fold: LengthBias) -> object:
    return fold.summary()


def table(fold: RunReport) -> object:
    return fold.lines()


def simulated(fold: Timeline) -> object:
    return fold.summary()


FOLDS = [
    pytest.param(Ledger, ledger, id="ledger"),
    pytest.param(Conservation, conservation, id="conservation"),
    pytest.param(Progress, progress, id="progress and ages"),
    pytest.param(LengthBias, length_bias, id="length bias"),
    pytest.param(RunReport, table, id="figures of a trace"),
    pytest.param(Timeline, simulated, id="figures of a simulation"),
]


@pytest.mark.parametrize(("fold", "shown"), FOLDS)
def test_a_fold_over_a_resumed_log_is_that_of_the_log_without_what_was_lost(
    fold: Callable[[], Any], shown: Callable[[Any], object], tmp_path: Path
) -> None:
    """Invariant 2: a prompt that is issued again counts once, as the group that was not lost."""
    before, lost, after = before_and_after()
    resumed = Resumed(checkpoint="c/1", after=len(before))
    folds: dict[str, Any] = {}
    for name, events in {"resumed": [*before, *lost, resumed, *after], "straight": [*before, resumed, *after]}.items():
        path = tmp_path / f"{name}.jsonl"
        write(path, events)
        folds[name] = fold()
        fold_events(path, folds[name])
    assert shown(folds["resumed"]) == shown(folds["straight"])
    assert shown(folds["straight"]) != shown(fold())


@pytest.mark.parametrize(("fold", "shown"), FOLDS)
@pytest.mark.parametrize("threaded", [False, True])
def test_the_folds_of_a_run_that_resumes_are_those_of_its_log(
    fold: Callable[[], Any], shown: Callable[[Any], object], threaded: bool, tmp_path: Path
) -> None:
    before, lost, after = before_and_after()
    path = tmp_path / "events.jsonl"
    write(path, [*before, *lost])
    live, read = fold(), fold()
    log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path, folds=[live], threaded=threaded)
    log.resume("c/1", after=len(before))
    for event in after:
        log.append(event)
    log.close()
    fold_events(tmp_path, read)
    assert shown(live) == shown(read)
    assert numbers(tmp_path)[len(before)] == len(before) + len(lost) + 1


def test_a_run_resumes_twice_and_only_from_what_its_log_had(tmp_path: Path) -> None:
    """The second resume goes back before the first one, which makes that void with all it led to."""
    path = tmp_path / "events.jsonl"
    before, lost, after = before_and_after()
    write(path, [*before, *lost])
    for _ in range(2):
        ledger = Ledger()
        log = EventLog(clock=lambda: 0.0, wall=lambda: 0.0, path=path, folds=[ledger])
        with pytest.raises(ValueError, match="cannot resume from event 999; the log had events up to"):
            log.resume("c/1", after=999)
        log.resume("c/1", after=len(before))
        for event in after:
            log.append(event)
        with pytest.raises(ValueError, match="something was already appended"):
            log.resume("c/1", after=len(before))
        log.close()
        assert (ledger.dispatched, ledger.trained, ledger.unsettled) == (10, 8, [])


def test_two_resumes_from_one_checkpoint_void_both_attempts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    resumed = Resumed(checkpoint="c", after=1)
    write(path, [Checkpointed(path="c", version=0), dispatched(0), resumed, dispatched(1), resumed, dispatched(2)])
    assert numbers(path) == [1, 5, 6]


def test_a_resume_that_a_later_one_made_void_voids_nothing(tmp_path: Path) -> None:
    """The second resume goes back to before the first: what the first had voided was part of that state."""
    path = tmp_path / "events.jsonl"
    events: list[AnyEvent] = [
        Checkpointed(path="a", version=0),
        dispatched(0),
        Checkpointed(path="b", version=0),
        Resumed(checkpoint="a", after=1),
        dispatched(1),
        Resumed(checkpoint="b", after=3),
    ]
    write(path, events)
    assert numbers(path) == [1, 2, 3, 6]


def test_a_log_without_a_resume_counts_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, life(0, step=1))
    assert numbers(path) == list(range(1, 7))


@pytest.mark.parametrize("given_back", [ClaimReturned(groups=[0]), OwnerDead(owner="driver-1", groups=[0])])
def test_a_claim_that_ends_makes_its_groups_ready_again(given_back: AnyEvent) -> None:
    ledger = Ledger()
    for event in [*life(0, step=1)[:3], given_back]:
        ledger.apply(event)
    assert ledger.count(Place.BUFFERED) == 2
    with pytest.raises(ValueError, match="group 0 cannot become ready again"):
        ledger.apply(given_back)
    ledger.apply(Claimed(claim="d", fence=2, groups=[0]))
    assert ledger.count(Place.CLAIMED) == 2
