"""Recorded runs: simulated ones, with failures, NaN rewards, stale groups and several plans."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of, seeded_delays
from asyncrl.engine.trace.recording import Recording

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture
def golden_log() -> Callable[[str], Path]:
    """Return the path of a log that is kept with the tests."""
    return lambda name: TRACES / f"{name}.jsonl"


def reward(group: int, index: int) -> float:
    """A third of the groups are flat, some samples have no reward, the rest differ."""
    if group % 3 == 1:
        return 1.0
    if group % 7 == 4 and index == 0:
        return math.nan
    return float((group + index) % 3)


@pytest.fixture(scope="session")
def record() -> Callable[..., Recording]:
    """Record a simulated run: keywords are settings; two generators, one of them slow, with failures.

    Runs of the same settings are one recording: tests change copies of its events.
    """
    made: dict[str, Recording] = {}

    def run(*, chain: Any = None, rank_gap: Any = None, seed: int = 1, **settings: Any) -> Recording:
        asked = str((seed, settings))
        if chain is not None or rank_gap is not None:
            return recorded(chain, rank_gap, seed, settings)
        if asked not in made:
            made[asked] = recorded(None, None, seed, settings)
        return made[asked]

    return run


def recorded(chain: Any, rank_gap: Any, seed: int, settings: dict[str, Any]) -> Recording:
    def fail(call: int) -> None:
        if call % 11 == 5:
            raise RuntimeError(f"call {call} went wrong")

    def length(call: int) -> int:
        return 2 + call % 9

    generators = [
        FakeGenerator(seconds=seeded_delays(seed), fail=fail, length=length),
        FakeGenerator(seconds=seeded_delays(seed + 1, mean_s=4.0, spread=1.0), length=length),
    ]
    config = simulated_config(**{"run__steps": 8, "trainer__ranks": 2, "rollout__groups_per_step": 3, **settings})
    gap = {} if rank_gap is None else {"rank_gap": rank_gap}
    outcome = simulate(
        config,
        task=FakeTask.in_order(reward),
        generators=generators,
        rank_seconds=seeded_delays(seed + 2),
        filters=chain,
        **gap,
    )
    assert outcome.ending.error is None or settings.get("expect_error"), outcome.ending
    return recording_of(outcome)
