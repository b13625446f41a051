"""What a resume makes void: folds count what comes before the checkpoint, and what comes after the resume."""

from pathlib import Path

import pytest

from asyncrl.engine.events.ledger import Ledger, Place
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
    Settled,
    StepEnded,
    StepStarted,
)


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
    with pytest.raises(ValueError, match="group 0 cannot be ready again"):
        ledger.apply(given_back)
    ledger.apply(Claimed(claim="d", fence=2, groups=[0]))
    assert ledger.count(Place.CLAIMED) == 2
