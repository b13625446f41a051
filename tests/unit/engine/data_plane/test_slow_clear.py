"""Clears that are slow or raise take their own groups only, whatever happens beside them."""

from functools import partial

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Consumption
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.settlement import Settlement
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.fate import dropped
from asyncrl.engine.testing.conformance.plane_contract import (
    TRAINER,
    claim_groups,
    contract_group,
    contract_partition,
    put_groups,
    rows_of,
)
from asyncrl.engine.testing.fakes import FaultyPlane


def test_dropping_a_during_the_slow_drop_of_b_leaves_c_and_d() -> None:
    """E2: the first clear takes 5 s, the second overtakes it."""

    async def main() -> None:
        inner = LocalPlane(clock=virtual_clock)
        plane = FaultyPlane(inner, {"clear": lambda number: anyio.sleep(5 if number == 1 else 0)})
        await inner.register(contract_partition("p"))
        metas = [contract_group(n) for n in range(4)]
        await put_groups(inner, "p", metas)
        ledger = Ledger()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[ledger])
        groups = Groups(plane=plane, partition="p", consumer=TRAINER, log=log, run_ahead=RunAhead(4))
        for meta in metas:
            groups.dispatch(Grant(meta.group, Prompt(0, "x"), meta.size, 0), "collector", served=0)
        claim = await claim_groups(inner, "p")
        groups.claim(claim)
        a, b, c, d = claim.groups

        async def drop(meta: GroupMeta, after_s: float) -> None:
            await anyio.sleep(after_s)
            await groups.settle([Settlement(meta, (dropped("test"),) * 2)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(drop, b, 0))
            tasks.start_soon(partial(drop, a, 1))
        assert groups.claimed(range(9)) == [c, d]
        assert await inner.keys("p") == [*c.keys, *d.keys]
        assert await inner.leased(groups.lease([c, d])) == {c.row, d.row}
        assert ledger.by_reason("dropped") == {"test": 4}

    run_virtual(main)


def test_a_clear_that_raises_does_not_make_its_group_ready() -> None:
    """E2: nor does it take a neighbour along, and it can be repeated."""

    def away(number: int) -> None:
        if number == 1:
            raise DataPlaneError("away")

    async def main() -> None:
        inner = LocalPlane(clock=virtual_clock)
        plane = FaultyPlane(inner, {"clear": away})
        await inner.register(contract_partition("p"))
        a, b = (contract_group(n) for n in range(2))
        await put_groups(inner, "p", [a, b])
        claim = await claim_groups(inner, "p", 1)
        with pytest.raises(DataPlaneError, match="away"):
            await plane.clear("p", a.keys, lease=claim.lease)
        assert await inner.consumption("p", TRAINER) == Consumption(ready=1, claimed=1)
        assert rows_of(await claim_groups(inner, "p")) == [b.row]
        await plane.clear("p", a.keys, lease=claim.lease)
        assert await inner.keys("p") == list(b.keys)

    run_virtual(main)
