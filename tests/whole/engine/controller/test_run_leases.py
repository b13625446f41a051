"""Leases that run out in whole runs: time ends the claims of the lost, and of nobody else."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.engine.data_plane.base import Claim, DataPlane
from asyncrl.engine.deployment import CONSUMER, PARTITION
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.testing.fakes import HANG_S, FaultyPlane
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.replay import replay

LEASE_S = 3.0


def run(before: Callable[[DataPlane], dict[str, Callable[[int], Any]]]) -> Outcome:
    """Train eight steps of 10 s, several leases each, while no renewal ever comes through."""

    def wrap(plane: DataPlane) -> DataPlane:
        hooks = {"renew": lambda call: anyio.sleep(HANG_S), **before(plane)}
        return FaultyPlane(plane, hooks)

    config = simulated_config(data_plane__lease_s=LEASE_S, rollout__max_staleness=2, run__steps=8)
    outcome = simulate(config, rank_seconds=lambda step: 10.0, wrap=wrap)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "step limit reached")
    assert (outcome.keys_left, outcome.ledger.unsettled, outcome.audit.faults) == ([], [], [])
    return outcome


def steal(plane: DataPlane, *calls: int, back: bool = False) -> Callable[[int], Any]:
    """Let another owner claim a group whose lease ran out before the n-th call; `back`: and give it back."""

    async def take(call: int) -> None:
        claim: Claim = await plane.claim(
            PARTITION, CONSUMER, columns=COLUMNS, max_groups=1, owner="rival", claim_id=f"rival/{call}"
        )
        assert len(claim.groups) == 1
        if back:
            await plane.give_back(claim.lease)

    return lambda call: take(call) if call in calls else None


def test_a_driver_that_renews_its_claims_keeps_them() -> None:
    """Steps of 10 s, leases of 3 s: another owner, who asks before each hand-off and clear, gets nothing of them."""
    taken: list[int] = []

    def wrap(plane: DataPlane) -> DataPlane:
        async def ask(call: int) -> None:
            claim = await plane.claim(
                PARTITION, CONSUMER, columns=COLUMNS, max_groups=9, owner="rival", claim_id=f"rival/{len(taken)}"
            )
            taken.append(len([group for group in claim.groups if group.group in held]))
            await plane.give_back(claim.lease)

        return FaultyPlane(plane, {"leased": ask, "clear": ask})

    held: set[int] = set()
    config = simulated_config(data_plane__lease_s=LEASE_S, rollout__max_staleness=2, run__steps=8)

    async def watch(controller: Any) -> None:
        while True:
            held.clear()
            held.update(meta.group for meta in controller.core.groups.claimed(range(1000)))
            await anyio.sleep(0.01)

    outcome = simulate(config, rank_seconds=lambda step: 10.0, wrap=wrap, beside=watch)
    assert outcome.ending.code == 0
    assert len(taken) > 8
    assert sum(taken) == 0


def test_a_lease_that_runs_out_under_the_only_driver_costs_nothing() -> None:
    """FOUND-C4: once a KeyError, when the driver claimed its own group again, or ClaimLost to nobody."""
    outcome = run(lambda plane: {})
    assert "lease_lost" not in outcome.ledger.by_reason("dropped")
    assert outcome.ledger.trained == 8 * 8


def test_what_another_owner_took_is_dropped_as_lost_and_the_run_goes_on() -> None:
    """FOUND-C4: counted, and its keys are the other owner's; a replay drops the same at hand-off."""
    outcome = run(lambda plane: {"leased": steal(plane, 2, 4)})
    assert outcome.ledger.by_reason("dropped")["lease_lost"] == 8
    assert replay(recording_of(outcome)).difference is None


def test_what_another_owner_takes_while_it_is_trained_stays_trained() -> None:
    """FOUND-C4: the clear of a step's groups once ended the run with ClaimLost."""
    outcome = run(lambda plane: {"clear": steal(plane, 2)})
    assert outcome.ledger.trained == 8 * 8


@pytest.mark.parametrize("operation", ["leased", "clear"])
def test_what_another_owner_gave_back_is_not_judged_a_second_time(operation: str) -> None:
    """FOUND-C4: a claim brings a group that has its fate, or is under way; once a KeyError."""
    outcome = run(lambda plane: {operation: steal(plane, 2, 4, back=True)})
    assert len(outcome.audit.fates) * 4 == outcome.ledger.dispatched
