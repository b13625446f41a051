"""Nothing moves, and everybody answers: the watchdog ends the run, and says who waits for whom."""

from typing import Any

import anyio
import pytest

from asyncrl.engine.errors import Overdue
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.loop.watchdog import longest_wait_s
from asyncrl.engine.testing.fakes import FakeRank
from asyncrl.engine.testing.simulation import simulate, simulated_config

# The longest limit is that of a checkpoint (1800 s), and an answer may take 60 s.
LIMIT = "nothing has moved for 1860 s: "


class SaysNoDigest(FakeRank):
    async def digest(self) -> Any:
        await anyio.sleep_forever()


class SaysNoWeights(FakeRank):
    async def weights(self) -> Any:
        if self.steps == 3:
            await anyio.sleep_forever()
        return await super().weights()


@pytest.mark.parametrize(
    ("rank", "steps", "said"),
    [
        (SaysNoDigest, 0, "trainer for start, collectors for prompts; no collector has any in flight"),
        (SaysNoWeights, 3, "trainer for step, collectors for capacity; no collector has any in flight, 0 buffered, "),
    ],
)
def test_a_call_that_is_never_answered_ends_a_run_whose_actors_live(
    rank: type[FakeRank], steps: int, said: str
) -> None:
    """CASE-B8: liveness is not progress."""
    outcome = simulate(simulated_config(rollout__max_staleness=1), rank=rank)
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, Overdue)
    assert LIMIT + said in outcome.ending.reason
    assert len(outcome.of(StepEnded)) == steps
    assert (outcome.ledger.unsettled, outcome.keys_left) == ([], [])


def test_a_slow_run_moves() -> None:
    """Steps of an hour, if that is allowed."""
    config = simulated_config(trainer__step_timeout_s=4000.0, supervision__starve_timeout_s=5000.0)
    assert longest_wait_s(config) == 5000.0 + 60.0
    outcome = simulate(config, rank_seconds=lambda step: 3600.0)
    assert outcome.ending.code == 0
    assert outcome.seconds > 3 * longest_wait_s(config)


def test_a_warm_up_may_take_as_long_as_its_steps() -> None:
    config = simulated_config(trainer__sft_warm_up_steps=100)
    assert longest_wait_s(config) == 100 * 120.0 + 60.0
