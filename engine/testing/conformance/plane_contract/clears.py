"""Clears: by key, once or twice, alone or beside others."""

import anyio

from asyncrl.engine.data_plane.base import Consumption, DataPlane
from asyncrl.engine.errors import MissingRows
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    TOKENS,
    TRAINER,
    claim_groups,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    refused,
    rows_of,
)


async def clearing_twice_is_clearing_once(plane: DataPlane) -> None:
    """E4: a second clear is a no-op; a missing key does not keep the others."""
    await plane.register(contract_partition("twice"))
    groups = [contract_group(n) for n in range(3)]
    await put_groups(plane, "twice", groups)
    for _ in range(2):
        await plane.clear("twice", groups[0].keys)
        assert sorted(await plane.keys("twice")) == sorted((*groups[1].keys, *groups[2].keys))
    await plane.clear("twice", ["missing", "v9_p9_g9", "v0_p2_g7", *groups[1].keys, *groups[0].keys])
    assert sorted(await plane.keys("twice")) == sorted(groups[2].keys)
    await plane.clear("twice", [])
    assert rows_of(await claim_groups(plane, "twice")) == ["v0_p2"]


async def cleared_keys_are_gone_at_once_and_the_row_with_the_last(plane: DataPlane) -> None:
    await plane.register(contract_partition("partial", size=3))
    group = contract_group(0, size=3)
    await put_groups(plane, "partial", [group])
    await plane.clear("partial", group.keys[:2])
    assert await plane.keys("partial") == [group.keys[2]]
    await refused(MissingRows, plane.read("partial", group.keys, (TOKENS,)), *group.keys[:2])
    await refused(MissingRows, plane.write("partial", "adv", {group.keys[0]: 1}, writer="w"), group.keys[0])
    assert (await plane.read("partial", group.keys[2:], (TOKENS,)))[TOKENS][0].tolist() == [0, 2, 0, 1]
    await plane.clear("partial", group.keys[1:])
    assert await plane.keys("partial") == []
    await put_groups(plane, "partial", [group])
    assert len(await read_one(plane, "partial", group)) == 3


async def a_group_with_a_cleared_key_is_never_claimed(plane: DataPlane) -> None:
    await plane.register(contract_partition("torn"))
    groups = [contract_group(n) for n in range(2)]
    await put_groups(plane, "torn", groups)
    await plane.clear("torn", groups[0].keys[:1])
    assert await plane.consumption("torn", TRAINER) == Consumption(ready=1, claimed=0)
    claim = await claim_groups(plane, "torn")
    assert rows_of(claim) == ["v0_p1"]
    await plane.clear("torn", groups[1].keys[:1], lease=claim.lease)
    assert await plane.consumption("torn", TRAINER) == Consumption(ready=0, claimed=1)
    await plane.give_back(claim.lease)
    assert (await claim_groups(plane, "torn")).groups == ()


async def concurrent_clears_take_their_own_groups_only(plane: DataPlane) -> None:
    """E2: of A, B, C, D, B is dropped and A meanwhile: C and D remain, whole."""
    await plane.register(contract_partition("drops"))
    a, b, c, d = (contract_group(n) for n in range(4))
    await put_groups(plane, "drops", [a, b, c, d])
    claim = await claim_groups(plane, "drops")
    async with anyio.create_task_group() as tasks:
        for group in (b, a):
            tasks.start_soon(lambda keys: plane.clear("drops", keys, lease=claim.lease), group.keys)
    assert sorted(await plane.keys("drops")) == sorted((*c.keys, *d.keys))
    await plane.give_back(claim.lease)
    assert rows_of(await claim_groups(plane, "drops")) == [c.row, d.row]
    assert [v[0].item() for v in await read_one(plane, "drops", d)] == [3, 3]


async def puts_claims_and_clears_at_once_lose_nothing_and_repeat_nothing(plane: DataPlane) -> None:
    """E1: what is put while others are cleared is complete when it is claimed, and claimed once."""
    await plane.register(contract_partition("churn"))
    total, seen = 60, list[int]()

    async def produce(numbers: range) -> None:
        for number in numbers:
            await put_groups(plane, "churn", [contract_group(number)])

    async def consume(owner: str) -> None:
        while len(seen) < total:
            claim = await claim_groups(plane, "churn", 3, owner=owner)
            seen.extend(group.group for group in claim.groups)
            for group in claim.groups:
                assert [v[0].item() for v in await read_one(plane, "churn", group)] == [group.group] * 2
                await plane.clear("churn", group.keys, lease=claim.lease)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        for third in range(3):
            tasks.start_soon(produce, range(third, total, 3))
        tasks.start_soon(consume, "one")
        tasks.start_soon(consume, "two")
    assert sorted(seen) == list(range(total))
    assert await plane.keys("churn") == []


CLEARS = (
    clearing_twice_is_clearing_once,
    cleared_keys_are_gone_at_once_and_the_row_with_the_last,
    a_group_with_a_cleared_key_is_never_claimed,
    concurrent_clears_take_their_own_groups_only,
    puts_claims_and_clears_at_once_lose_nothing_and_repeat_nothing,
)
