"""Partitions: registered once, known to all, apart from each other."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch

from asyncrl.engine.data_plane.base import DataPlane, Lease
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    TOKENS,
    TRAINER,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    refused,
    rows_of,
)


async def a_partition_registers_again_as_it_is_and_not_otherwise(plane: DataPlane) -> None:
    await plane.register(contract_partition("registered"))
    await put_groups(plane, "registered", [contract_group(0)])
    await plane.register(contract_partition("registered"))
    for other in (
        contract_partition("registered", size=3),
        contract_partition("registered", columns=("other",)),
        contract_partition("registered", consumers=(TRAINER, "more")),
        contract_partition("registered", objects=(TOKENS,)),
    ):
        await refused(DataPlaneError, plane.register(other), "registered")
    await put_groups(plane, "registered", [contract_group(1)])
    assert len((await claim_groups(plane, "registered")).groups) == 2


async def a_partition_is_told_as_it_was_registered(plane: DataPlane) -> None:
    given = contract_partition("told", size=3, columns=(TOKENS, "image", "notes"), objects=("notes",))
    await plane.register(given)
    assert await plane.partition("told") == given
    assert (await plane.partition("told")).tensors == (TOKENS, "image")


async def unknown_partitions_and_consumers_are_errors(plane: DataPlane) -> None:
    await plane.register(contract_partition("known"))
    group = contract_group(0)
    lease = Lease("unknown", TRAINER, {group.row: 1})
    calls: Mapping[str, Callable[[], Awaitable[Any]]] = {
        "partition": lambda: plane.partition("unknown"),
        "put": lambda: plane.put("unknown", group, contract_columns(group)),
        "claim": lambda: claim_groups(plane, "unknown"),
        "give_back": lambda: plane.give_back(lease),
        "renew": lambda: plane.renew(lease),
        "leased": lambda: plane.leased(lease),
        "reap": lambda: plane.reap("unknown", ["owner"]),
        "read": lambda: plane.read("unknown", group.keys, (TOKENS,)),
        "write": lambda: plane.write("unknown", "adv", {group.keys[0]: 1}, writer="w"),
        "clear": lambda: plane.clear("unknown", group.keys),
        "consumption": lambda: plane.consumption("unknown", TRAINER),
        "keys": lambda: plane.keys("unknown"),
        "groups": lambda: plane.groups("unknown"),
    }
    for name, call in calls.items():
        try:
            await refused(DataPlaneError, call())
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from failure
    await refused(DataPlaneError, claim_groups(plane, "known", consumer="stranger"), "stranger", TRAINER)
    await refused(DataPlaneError, plane.consumption("known", "stranger"), "stranger")


async def partitions_do_not_see_each_other(plane: DataPlane) -> None:
    await plane.register(contract_partition("left"))
    await plane.register(contract_partition("right"))
    group = contract_group(0)
    await put_groups(plane, "left", [group])
    await plane.put("right", group, {TOKENS: [torch.tensor([9])] * 2})
    assert rows_of(await claim_groups(plane, "left")) == [group.row]
    assert rows_of(await claim_groups(plane, "right")) == [group.row]
    await plane.clear("left", group.keys)
    assert [v.tolist() for v in await read_one(plane, "right", group)] == [[9], [9]]


async def the_groups_of_a_partition_are_the_whole_ones_claimed_or_not(plane: DataPlane) -> None:
    await plane.register(contract_partition("listed"))
    groups = [contract_group(n, reward=[0.0, 1.0]) for n in range(4)]
    await put_groups(plane, "listed", groups)
    await plane.write("listed", "adv", dict.fromkeys(groups[1].keys, 1), writer="rank0")
    await claim_groups(plane, "listed", 1)
    await plane.clear("listed", (*groups[2].keys, groups[3].keys[0]))
    assert sorted(group.keys for group in await plane.groups("listed")) == [group.keys for group in groups[:2]]


PARTITIONS = (
    a_partition_registers_again_as_it_is_and_not_otherwise,
    a_partition_is_told_as_it_was_registered,
    unknown_partitions_and_consumers_are_errors,
    partitions_do_not_see_each_other,
    the_groups_of_a_partition_are_the_whole_ones_claimed_or_not,
)
