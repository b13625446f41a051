"""What engines did between two steps, from totals in put notices."""

import pytest

from asyncrl.engine import metrics
from asyncrl.engine.loop.engine_uses import EngineUses
from asyncrl.engine.records.engine_use import EngineUse


def test_shares_and_rates_are_of_the_time_since_the_last_step_over_all_collectors() -> None:
    uses = EngineUses()
    assert set(uses.take().values()) == {0.0}
    uses.report("a", EngineUse(up_s=5.0, busy_s=5.0, tokens=100))
    uses.report("a", EngineUse(up_s=10.0, busy_s=8.0, paused_s=1.0, tokens=200, running=3, waiting=1, cache_used=0.5))
    first = uses.take()
    assert (first[metrics.ENGINE_BUSY], first[metrics.ENGINE_PAUSED]) == (0.8, 0.1)
    uses.report("a", EngineUse(up_s=20.0, busy_s=17.0, paused_s=1.0, tokens=300, running=2, waiting=0, cache_used=0.5))
    uses.report("b", EngineUse(up_s=30.0, busy_s=3.0, tokens=600, running=1, waiting=4, cache_used=0.1))
    second = uses.take()
    assert second == pytest.approx(
        {
            metrics.ENGINE_BUSY: (0.9 + 0.1) / 2,
            metrics.ENGINE_PAUSED: 0.0,
            metrics.ENGINE_CACHE: 0.3,
            metrics.ENGINE_RUNNING: 3,
            metrics.ENGINE_WAITING: 4,
            metrics.ENGINE_TOKEN_RATE: 10 + 20,
        }
    )


def test_a_collector_that_brought_nothing_since_the_last_step_counts_as_it_did() -> None:
    uses = EngineUses()
    uses.report("a", EngineUse(up_s=10.0, busy_s=9.0))
    assert [uses.take()[metrics.ENGINE_BUSY] for _ in range(2)] == [0.9, 0.9]
    uses.report("a", EngineUse(up_s=40.0, busy_s=24.0))
    assert uses.take()[metrics.ENGINE_BUSY] == 0.5
