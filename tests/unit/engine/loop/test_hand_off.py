"""The front end by itself: age and claim of every kept group again at hand-off, the tail of the data, the gate."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Claim, Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.loop.front_end import FrontEnd, FrontEndSettings
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.testing.conformance.plane_contract import contract_columns, contract_group
from asyncrl.filters import build_chain
from asyncrl.filters.statistics import RunningStatistics


class Busy(LocalPlane):
    """Lets something happen `meanwhile`, before its next claim."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def claim(self, partition: str, consumer: str, **how: Any) -> Claim:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().claim(partition, consumer, **how)


class Desk:
    """A front end at trainer version 3 and bound 2, over groups of the versions given."""

    def __init__(self, versions: Sequence[int], filters: Sequence[dict[str, object]], **options: Any) -> None:
        self.metas = [
            contract_group(
                number,
                version=version,
                prompt=number,
                dataset="d",
                reward=[0.0, 1.0],
                status=["finished"] * 2,
                cause=[None] * 2,
                prompt_tokens=1,
                response_tokens=[1, 1],
                trainable_tokens=[1, 1],
            )
            for number, version in enumerate(versions)
        ]
        self.plane = Busy(clock=virtual_clock)
        self.ledger = Ledger()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[self.ledger])
        self.groups = Groups(
            plane=self.plane, partition="train", consumer="trainer", log=log, run_ahead=RunAhead(len(self.metas) + 1)
        )
        self.versions = Versions(["collector"])
        self.versions.jump_to(3)
        settings = FrontEndSettings(
            **{
                "owner": "driver",
                "groups_per_step": 2,
                "max_staleness": 2,
                "stale_mode": "drop",
                "gate_timeout_s": 600.0,
                "seed": 0,
                "poll_s": 1.0,
                "starve_timeout_s": 100.0,
                "lease_s": 600.0,
                **options,
            }
        )
        self.judged = RunningStatistics()
        self.front_end = FrontEnd(
            settings,
            plane=self.plane,
            groups=self.groups,
            chain=build_chain(list(filters), min_live=2),
            versions=self.versions,
            log=log,
            judged=self.judged,
            more_may_come=lambda: False,
        )

    async def put(self) -> None:
        await self.plane.register(Partition("train", 2, COLUMNS, ("trainer",)))
        for meta in self.metas:
            self.groups.dispatch(Grant(meta.group, Prompt(meta.group, "1"), 2, 0), "collector", served=meta.version)
            await self.plane.put("train", meta, dict.fromkeys(COLUMNS, contract_columns(meta)["tokens"]))
            self.groups.arrive(meta)


def run(
    body: Callable[[Desk], Awaitable[None]],
    *,
    versions: Sequence[int],
    filters: Sequence[dict[str, object]] = (),
    **options: Any,
) -> None:
    async def main() -> None:
        desk = Desk(versions, filters, **options)
        await desk.put()
        await body(desk)

    run_virtual(main)


def test_a_group_that_another_owner_holds_by_now_falls_out_and_its_keys_stay_with_that_owner() -> None:
    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        lost = batch.kept[0].group
        await desk.plane.reap("train", ["driver"])
        other = await desk.plane.claim(
            "train", "trainer", columns=COLUMNS, max_groups=1, owner="other", claim_id="theirs"
        )
        assert [group.row for group in other.groups] == [lost.row]
        # The driver's other group was reaped too: nobody holds it.
        await desk.front_end.hand_off(batch)
        assert batch.kept == []
        assert batch.drops == {"lease_lost": 2}
        assert desk.ledger.by_reason("dropped") == {"lease_lost": 4}
        assert set(lost.keys) <= set(await desk.plane.keys("train"))
        assert await desk.plane.leased(other.lease) == {lost.row}

    run(body, versions=[3, 3])


def test_what_became_too_old_falls_out_cleared_and_the_batch_goes_short_without_refill() -> None:
    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        desk.versions.jump_to(4)
        await desk.front_end.hand_off(batch)
        assert [judgement.group.version for judgement in batch.kept] == [3]
        assert batch.drops == {"stale": 1}
        assert await desk.plane.keys("train") == list(desk.metas[1].keys)

    run(body, versions=[1, 3])


@pytest.mark.parametrize("under_way", [False, True])
def test_a_replacement_at_hand_off_is_judged_at_the_version_it_is_trained_at(under_way: bool) -> None:
    """The batch handed over is the one under way: V, not V + 1, is what its replacements meet."""

    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        assert [judgement.group.group for judgement in batch.kept] == [0, 1]
        desk.versions.jump_to(4)
        if under_way:
            desk.versions.hand_over()
        await desk.front_end.hand_off(batch)
        # Age 2 at version 4: within the bound; at 5 it would not be.
        assert [judgement.group.group for judgement in batch.kept] == [1, 2]

    run(body, versions=[1, 2, 2], filters=[{"name": "dynamic_sampling"}])


def test_what_is_lost_while_a_replacement_is_claimed_falls_out_as_well() -> None:
    """The hand-off looks again after each refill."""

    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        second = desk.metas[1]
        desk.versions.jump_to(4)

        async def lose_the_second() -> None:
            await desk.plane.give_back(desk.groups.lease([second]))
            other = await desk.plane.claim("train", "trainer", columns=COLUMNS, max_groups=1, owner="b", claim_id="b/0")
            assert [group.row for group in other.groups] == [second.row]

        desk.plane.meanwhile = lose_the_second
        await desk.front_end.hand_off(batch)
        assert [judgement.group.group for judgement in batch.kept] == [2, 3]
        assert batch.drops == {"stale": 1, "lease_lost": 1}

    run(body, versions=[1, 3, 3, 3], filters=[{"name": "dynamic_sampling"}])


def test_the_tail_of_the_data_is_judged_without_a_wait() -> None:
    """No second group can come, so the front end does not wait for its slow poll."""

    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        assert [judgement.group.group for judgement in batch.kept] == [0]
        assert virtual_clock() < 1.0

    run(body, versions=[3])


def test_a_group_that_is_too_old_when_it_is_claimed_counts_in_the_statistics() -> None:
    async def body(desk: Desk) -> None:
        batch = await desk.front_end.next_batch()
        assert [judgement.group.group for judgement in batch.kept] == [1]
        assert {prompt: tally.samples for prompt, tally in desk.judged.prompts.items()} == {0: 2, 1: 2}

    run(body, versions=[0, 3])


def test_a_batch_waits_once_at_the_gate_however_often_it_claims() -> None:
    """An old group stays in flight; the first claim waits for it until the deadline, the refill does not."""

    async def body(desk: Desk) -> None:
        desk.groups.dispatch(Grant(3, Prompt(3, "1"), 2, 0), "collector", served=1)
        batch = await desk.front_end.next_batch()
        assert batch.judged == [0, 1, 2]
        assert [judgement.group.group for judgement in batch.kept] == [1, 2]
        assert desk.front_end.statistics().gate_waits == 1
        assert 10.0 <= virtual_clock() < 15.0

    filters: list[dict[str, object]] = [{"name": "staleness", "max_age": 0}, {"name": "dynamic_sampling"}]
    run(body, versions=[2, 3, 3], filters=filters, stale_mode="gate", gate_timeout_s=10.0)
