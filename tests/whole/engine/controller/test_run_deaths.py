"""An actor's death stands in the log, with who and why, before the end of the run; replay and folds take it."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.types import OwnerDead, Settled
from asyncrl.engine.records.work import RankResult, TrainWork
from asyncrl.engine.testing.fakes import FakeRank, FaultyPlane
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.replay import replay
from asyncrl.engine.trace.what_if import what_if


class Killed(FakeRank):
    """Its process is gone in step 3: the call under way says so, and the long poll never comes to it."""

    async def train(self, work: TrainWork) -> RankResult:
        if work.step == 3 and self.name == "rank1":
            raise ActorDied("rank1 died during train: out of memory", actor="rank1")
        return await super().train(work)


class Silent(FakeRank):
    """Answers no long poll."""

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        await anyio.sleep_forever()
        raise AssertionError


def put_fails(number: int) -> Any:
    def before(call: int) -> None:
        if call == number:
            raise OSError("the disk is gone")

    return lambda plane: FaultyPlane(plane, {"put": before})


def deaths(outcome: Outcome) -> Sequence[OwnerDead]:
    found = outcome.of(OwnerDead)
    # Before what the run's end settles.
    settled = [e for e in outcome.of(Settled) if any(fate.endswith("run_ended") for fate in e.fates)]
    assert settled
    assert all(death.seq < event.seq for death in found for event in settled)
    return found


@pytest.mark.parametrize(
    ("how", "owner", "why"),
    [
        ({"wrap": put_fails(5)}, "collector0", "OSError: the disk is gone"),
        ({"rank": Killed}, "rank1", "ActorDied: rank1 died during train: out of memory"),
        ({"rank": Silent}, "rank", "ActorDied: rank* has answered nothing for 60 s"),
    ],
    ids=["a collector's own error", "a killed rank", "a silent rank"],
)
def test_a_death_is_logged_once_with_who_and_why_and_the_log_replays(how: dict[str, Any], owner: str, why: str) -> None:
    config = simulated_config(run__steps=200, trainer__ranks=2)
    outcome = simulate(config, **how)
    assert outcome.ending.code == 1
    died = deaths(outcome)
    # Both ranks fall silent at one moment; either may be the first.
    who = died[0].owner
    assert who.startswith(owner)
    assert (died[0].groups, died[0].error) == ([], why.replace("rank*", who))
    # Both ranks are silent, and who is heard of first is a matter of order; no one dies twice.
    assert len({event.owner for event in died}) == len(died) <= (2 if how.get("rank") is Silent else 1)
    recording = recording_of(outcome)
    assert replay(recording).difference is None
    assert what_if(recording, recording.config()).note == ""
    assert prove(recording.events).faults() == []
    assert outcome.ledger.unsettled == []
    assert outcome.audit.faults == []


def test_an_error_of_a_call_is_no_death() -> None:
    """The rank lives: what it raised is the run's end, and stands in RunEnded."""

    def fail(step: int) -> None:
        if step == 2:
            raise ArithmeticError("NaN")

    outcome = simulate(simulated_config(), rank_fail=fail)
    assert outcome.ending.reason == "ArithmeticError: NaN"
    assert outcome.of(OwnerDead) == []
