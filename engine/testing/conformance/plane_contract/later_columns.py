"""Columns that come after the put, from several writers."""

import torch

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import DataPlaneError, MissingRows
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    TOKENS,
    claim_groups,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    refused,
    rows_of,
)


async def later_columns_come_from_several_writers(plane: DataPlane) -> None:
    await plane.register(contract_partition("later"))
    groups = [contract_group(n) for n in range(2)]
    await put_groups(plane, "later", groups)
    (a0, a1), (b0, b1) = (group.keys for group in groups)
    await plane.write("later", "adv", {a0: torch.tensor([1.0]), b1: torch.tensor([4.0])}, writer="rank0")
    await plane.write("later", "adv", {a1: torch.tensor([2.0]), b0: torch.tensor([3.0])}, writer="rank1")
    await plane.write("later", "note", {a0: "plain"}, writer="rank0")
    # Written again after a lost answer: the same, once.
    await plane.write("later", "adv", {a1: torch.tensor([2.0]), b0: torch.tensor([3.0])}, writer="rank1")
    values = await plane.read("later", (b0, b1, a1, a0), ("adv", TOKENS))
    assert [v.item() for v in values["adv"]] == [3.0, 4.0, 2.0, 1.0]
    assert [v[0].item() for v in values[TOKENS]] == [1, 1, 0, 0]
    assert await plane.read("later", (a0,), ("note",)) == {"note": ["plain"]}
    await refused(MissingRows, plane.read("later", (a0, a1), ("note",)), a1, "note")
    assert len(await plane.keys("later")) == 4


async def a_writer_cannot_overwrite_what_it_or_the_put_brought(plane: DataPlane) -> None:
    await plane.register(contract_partition("overwrite"))
    group = contract_group(0)
    await put_groups(plane, "overwrite", [group])
    await plane.write("overwrite", "adv", {group.keys[0]: 1}, writer="rank0")
    await refused(
        DataPlaneError, plane.write("overwrite", "adv", {group.keys[1]: 2}, writer="rank0"), "adv", group.keys[0]
    )
    await refused(DataPlaneError, plane.write("overwrite", TOKENS, {group.keys[0]: 2}, writer="rank0"), TOKENS)
    await refused(MissingRows, plane.write("overwrite", "adv", {"v0_p9_g0": 2}, writer="rank1"), "v0_p9_g0")
    assert await plane.read("overwrite", group.keys[:1], ("adv",)) == {"adv": [1]}
    assert len((await read_one(plane, "overwrite", group))[0]) == 2


async def a_group_is_ready_when_the_later_column_has_all_its_keys(plane: DataPlane) -> None:
    await plane.register(contract_partition("readiness", later=("adv",)))
    groups = [contract_group(n) for n in range(2)]
    await put_groups(plane, "readiness", groups)
    await plane.write("readiness", "adv", {groups[1].keys[0]: 1.0}, writer="rank0")
    columns = (TOKENS, "adv")
    assert (await claim_groups(plane, "readiness", columns=columns)).groups == ()
    await plane.write("readiness", "adv", {groups[1].keys[1]: 1.0}, writer="rank1")
    assert rows_of(await claim_groups(plane, "readiness", columns=columns)) == ["v0_p1"]
    assert rows_of(await claim_groups(plane, "readiness")) == ["v0_p0"]


async def later_columns_go_with_their_group(plane: DataPlane) -> None:
    await plane.register(contract_partition("gone"))
    group, again = contract_group(0), contract_group(0)
    await put_groups(plane, "gone", [group])
    await plane.write("gone", "adv", dict.fromkeys(group.keys, 1), writer="rank0")
    await plane.clear("gone", group.keys)
    await put_groups(plane, "gone", [again])
    await refused(MissingRows, plane.read("gone", again.keys, ("adv",)), "adv")


LATER_COLUMNS = (
    later_columns_come_from_several_writers,
    a_writer_cannot_overwrite_what_it_or_the_put_brought,
    a_group_is_ready_when_the_later_column_has_all_its_keys,
    later_columns_go_with_their_group,
)
