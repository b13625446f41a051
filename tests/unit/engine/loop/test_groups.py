"""The register of groups: the order of an end, who is told of it, and that nothing stays."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import AnyEvent, Settled
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.settlement import Settlement, drop_fates, trained_fates
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.testing.conformance.plane_contract import contract_columns
from asyncrl.engine.testing.fakes import fake_group


class Watched(LocalPlane):
    """Says in `acts` when keys are cleared."""

    acts: list[str]

    async def clear(self, partition: str, keys: Sequence[str], **how: Any) -> None:
        self.acts.append("cleared")
        await super().clear(partition, keys, **how)


class Register:
    """Groups 0 and 1, put and, but for group 2, which is in flight, claimed. `acts`: fates and clears in order."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.plane = Watched(clock=virtual_clock)
        self.plane.acts = self.acts
        self.ledger = Ledger()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[self.ledger, self])
        self.groups = Groups(plane=self.plane, partition="train", consumer="trainer", log=log, run_ahead=RunAhead(3))
        self.metas = [fake_group(number, [0.0, 1.0]) for number in range(2)]

    def apply(self, event: AnyEvent) -> None:
        if isinstance(event, Settled):
            self.acts.append("fate")

    async def start(self) -> None:
        await self.plane.register(Partition("train", 2, COLUMNS, ("trainer",)))
        for number in range(3):
            self.groups.dispatch(Grant(number, Prompt(number, "1"), 2, 0), "collector", served=0)
        for meta in self.metas:
            await self.plane.put("train", meta, dict.fromkeys(COLUMNS, contract_columns(meta)["tokens"]))
            self.groups.arrive(meta)
        self.groups.claim(await self.claim("driver"))

    async def claim(self, owner: str) -> Any:
        return await self.plane.claim(
            "train", "trainer", columns=COLUMNS, max_groups=2, owner=owner, claim_id=f"{owner}/0"
        )

    def settlements(self) -> list[Settlement]:
        return [Settlement(meta, drop_fates(meta, "stale")) for meta in self.metas]


def run(body: Callable[[Register], Awaitable[None]]) -> None:
    async def main() -> None:
        register = Register()
        await register.start()
        await body(register)

    run_virtual(main)


def test_fates_are_logged_before_keys_are_cleared_and_capacity_waits_for_its_release() -> None:
    async def body(register: Register) -> None:
        await register.groups.settle(register.settlements())
        assert register.acts == ["fate", "fate", "cleared"]
        assert register.ledger.by_reason("dropped") == {"stale": 4}
        assert await register.plane.keys("train") == []
        assert register.groups.run_ahead.used == 3
        register.groups.release([0, 1])
        assert register.groups.run_ahead.used == 1

    run(body)


def test_a_settlement_wakes_who_waits_for_it() -> None:
    async def body(register: Register) -> None:
        groups = register.groups
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(groups.settle, register.settlements())
            assert await groups.changed.wait_at_most(lambda: not groups.claimed(range(3)), 5.0)
            assert virtual_clock() < 5.0

    run(body)


def test_keys_of_a_claim_that_another_has_by_now_are_not_cleared() -> None:
    """The clear carries the claim's fence: without it the other's keys would go."""

    async def body(register: Register) -> None:
        await register.plane.reap("train", ["driver"])
        other = await register.claim("other")
        await register.groups.settle(register.settlements())
        assert await register.plane.leased(other.lease) == {meta.row for meta in register.metas}
        assert len(await register.plane.keys("train")) == 4

    run(body)


def test_the_end_of_a_run_settles_what_is_in_flight_and_claimed_and_frees_all_of_it() -> None:
    async def body(register: Register) -> None:
        await register.groups.settle_rest()
        assert register.ledger.by_reason("dropped") == {"run_ended": 6}
        assert register.ledger.unsettled == []
        assert register.groups.run_ahead.used == 0
        assert await register.plane.keys("train") == []

    run(body)


def test_of_a_dead_collector_what_it_put_whole_stays_and_what_comes_late_is_cleared() -> None:
    """Group 2 was put, and its notice died with the collector; group 3 comes to the plane after the burial."""

    async def body(register: Register) -> None:
        groups, plane = register.groups, register.plane
        groups.release([0])
        groups.dispatch(Grant(3, Prompt(3, "1"), 2, 0), "collector", served=0)
        put, late = fake_group(2, [0.0, 1.0]), fake_group(3, [0.0, 1.0])
        await plane.put("train", put, dict.fromkeys(COLUMNS, contract_columns(put)["tokens"]))
        assert groups.awaited() == "collector has 2 (for 0 s)"
        assert await groups.bury("collector", "killed") == [3]
        assert (groups.buffered, groups.any_in_flight) == (1, False)
        assert register.ledger.fates == {"failed:collector_died": 2}
        await plane.put("train", late, dict.fromkeys(COLUMNS, contract_columns(late)["tokens"]))
        await groups.clear_lost([3])
        assert sorted(await plane.keys("train")) == sorted(key for meta in (*register.metas, put) for key in meta.keys)

    run(body)


def test_fates_of_a_group_name_what_was_trained_masked_and_failed() -> None:
    group = fake_group(0, [0.0, 1.0, 0.5, 0.0], failed=[3])
    assert trained_fates(group, [0, 2], {1: "over_budget", 0: "not read"}) == (
        "trained",
        "masked:over_budget",
        "trained",
        "failed:score_error",
    )
    assert drop_fates(group, "stale") == ("dropped:stale",) * 3 + ("failed:score_error",)


def test_a_notice_that_comes_after_the_claim_changes_nothing() -> None:
    async def body(register: Register) -> None:
        groups, arrivals = register.groups, register.groups.arrivals
        groups.arrive(register.metas[0])
        assert (groups.buffered, groups.arrivals) == (0, arrivals)
        assert [meta.group for meta in groups.claimed(range(3))] == [0, 1]

    run(body)


def test_a_sample_that_is_neither_trained_masked_nor_failed_is_an_error() -> None:
    """Otherwise a fault of filters or selection would pass for the end of the run."""
    with pytest.raises(AsyncRLError, match=r"v0_p3_g1 in a batch that was trained: neither trained, masked nor failed"):
        trained_fates(fake_group(3, [1.0, 0.0]), [0], {})


def test_what_is_claimed_and_not_judged_when_a_checkpoint_is_made_is_to_be_claimed_again() -> None:
    """No batch has it, so nobody would judge it."""

    async def body(register: Register) -> None:
        places = [(state.grant.group, state.place) for state in register.groups.state({1})]
        assert places == [(0, "buffered"), (1, "claimed"), (2, "in_flight")]

    run(body)
