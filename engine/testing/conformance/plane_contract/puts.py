"""Puts and reads: what comes back, what is refused, what stays of a put that ended early."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import torch

from asyncrl.engine.data_plane.base import Column, DataPlane
from asyncrl.engine.errors import ClaimLost, DataPlaneError, MissingRows, StoreFull, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import STORED_AT
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    FULL_AT_ROWS,
    TOKENS,
    claim_groups,
    contract_columns,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    refused,
    rows_of,
    same_bits,
)


async def what_is_put_is_claimed_and_read_as_it_was(plane: DataPlane) -> None:
    await plane.register(contract_partition("round_trip", columns=(TOKENS, "notes"), objects=["notes"]))
    group = contract_group(7, version=3, reward=[0.5, math.inf], status=["finished", "failed"], dataset="d", none=None)
    columns: dict[str, list[Any]] = {**contract_columns(group), "notes": ["a", {"x": [1, None]}]}
    stored = await plane.put("round_trip", group, columns)
    # On several nodes it says where it is.
    assert stored.keys == group.keys
    assert {name: value for name, value in stored.tags.items() if name != STORED_AT} == group.tags
    (claimed,) = (await claim_groups(plane, "round_trip", columns=(TOKENS, "notes"))).groups
    assert claimed == stored
    values = await plane.read("round_trip", tuple(reversed(group.keys)), ("notes", TOKENS))
    assert values["notes"] == ["a", {"x": [1, None]}][::-1]
    assert [v.tolist() for v in values[TOKENS]] == [[7, 1, 0], [7, 0]]


async def a_read_crosses_groups_and_takes_only_what_it_names(plane: DataPlane) -> None:
    await plane.register(contract_partition("crossing"))
    groups = [contract_group(n) for n in range(3)]
    await put_groups(plane, "crossing", groups)
    keys = (groups[2].keys[1], groups[0].keys[0], groups[2].keys[0])
    values = await plane.read("crossing", keys, (TOKENS,))
    assert [v[:2].tolist() for v in values[TOKENS]] == [[2, 1], [0, 0], [2, 0]]
    assert await plane.read("crossing", (), (TOKENS,)) == {TOKENS: []}


async def a_read_names_what_is_missing_and_never_answers_less(plane: DataPlane) -> None:
    await plane.register(contract_partition("strict"))
    group = contract_group(0)
    await put_groups(plane, "strict", [group])
    for stranger in ("v0_p1_g0", "v1_p0_g0", "v0_p0_g2", "no key at all"):
        await refused(MissingRows, plane.read("strict", (group.keys[0], stranger), (TOKENS,)), stranger)
    await refused(MissingRows, plane.read("strict", group.keys, (TOKENS, "nothing")), group.keys[0], "nothing")


async def a_row_put_again_after_its_clear_is_a_new_row(plane: DataPlane) -> None:
    await plane.register(contract_partition("again"))
    group = contract_group(0)
    await put_groups(plane, "again", [group])
    old = await claim_groups(plane, "again")
    await plane.clear("again", group.keys, lease=old.lease)
    await put_groups(plane, "again", [group])
    assert await plane.leased(old.lease) == frozenset()
    new = await claim_groups(plane, "again")
    assert rows_of(new) == [group.row]
    await refused(ClaimLost, plane.clear("again", group.keys, lease=old.lease), group.row)
    assert len(await read_one(plane, "again", group)) == 2


async def a_row_put_twice_is_refused_and_the_first_stays(plane: DataPlane) -> None:
    await plane.register(contract_partition("doubled"))
    group = contract_group(0)
    await put_groups(plane, "doubled", [group])
    claim = await claim_groups(plane, "doubled")
    await refused(DataPlaneError, plane.put("doubled", group, {TOKENS: [torch.zeros(9)] * 2}), group.row)
    assert await plane.leased(claim.lease) == {group.row}
    assert [v.tolist() for v in await read_one(plane, "doubled", group)] == [[0, 0], [0, 1, 0]]


def _bad_puts(group: GroupMeta) -> Mapping[str, tuple[type[Exception], GroupMeta, Mapping[str, Column]]]:
    good = contract_columns(group)
    row, ids = torch.zeros(1), group.keys

    def tagged(**tags: Any) -> GroupMeta:
        return GroupMeta(ids, {**group.tags, **tags})

    def untagged(name: str) -> GroupMeta:
        return GroupMeta(ids, {tag: value for tag, value in group.tags.items() if tag != name})

    return {
        "group too large": (DataPlaneError, contract_group(0, size=3), {TOKENS: [row] * 3}),
        "group too small": (DataPlaneError, contract_group(0, size=1), {TOKENS: [row]}),
        "column missing": (DataPlaneError, group, {}),
        "column unknown": (DataPlaneError, group, {**good, "more": [1, 2]}),
        "column too short": (DataPlaneError, group, {TOKENS: [row]}),
        "dtypes mixed": (TypeError, group, {TOKENS: [row, row.to(torch.int64)]}),
        "kinds mixed": (TypeError, group, {TOKENS: [row, "text"]}),
        "kinds mixed, other way": (TypeError, group, {TOKENS: [None, row]}),
        "dtype unknown": (TypeError, group, {TOKENS: [torch.zeros(1, dtype=torch.complex64)] * 2}),
        "tag a tensor": (TagError, tagged(extra=row), good),
        "tag a list of arrays": (TagError, tagged(extra=[np.zeros(1)] * 2), good),
        "tag a NumPy float": (TagError, tagged(extra=np.float64(1)), good),
        "tag a mapping": (TagError, tagged(extra={"a": 1}), good),
        "tag nested": (TagError, tagged(extra=[[1], [2]]), good),
        "no version": (TagError, untagged("version"), good),
        "no version number": (TagError, tagged(version=None), good),
        "version a bool": (TagError, tagged(version=True), good),
        "version a float": (TagError, tagged(version=1.0), good),
        "no group number": (TagError, untagged("group"), good),
        "keys of two groups": (DataPlaneError, GroupMeta(("v0_p0_g0", "v0_p1_g1"), group.tags), good),
        "one key twice": (DataPlaneError, GroupMeta(("v0_p0_g0", "v0_p0_g0"), group.tags), good),
        "no sample keys": (DataPlaneError, GroupMeta(("a_g0", "a_g1"), group.tags), good),
    }


async def what_does_not_fit_is_refused_at_the_put_and_leaves_nothing(plane: DataPlane) -> None:
    await plane.register(contract_partition("misfits"))
    group = contract_group(0)
    for what, (error, bad, columns) in _bad_puts(group).items():
        try:
            await refused(error, plane.put("misfits", bad, columns))
        except AssertionError as failure:
            raise AssertionError(f"{what}: {failure}") from failure
        assert await plane.keys("misfits") == [], what
    await put_groups(plane, "misfits", [group])
    assert rows_of(await claim_groups(plane, "misfits")) == [group.row]


async def a_column_of_another_kind_than_declared_is_refused(plane: DataPlane) -> None:
    await plane.register(contract_partition("kinds", columns=(TOKENS, "notes"), objects=["notes"]))
    group = contract_group(0)
    tokens, notes = contract_columns(group)[TOKENS], ["a", None]
    bad: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({TOKENS: ["a", "b"], "notes": notes}, (TOKENS, "'kinds'", "tensors", "sample 0 brings str")),
        ({TOKENS: [tokens[0], 1.5], "notes": notes}, (TOKENS, "tensors", "sample 1 brings float")),
        ({TOKENS: tokens, "notes": tokens}, ("notes", "'kinds'", "plain objects", "sample 0 brings Tensor")),
        ({TOKENS: tokens, "notes": [{1, 2}, None]}, ("notes", "set")),
    ]
    for columns, words in bad:
        await refused(TypeError, plane.put("kinds", group, columns), group.row, *words)
    assert await plane.keys("kinds") == []
    await plane.put("kinds", group, {TOKENS: tokens, "notes": notes})


async def one_prompt_twice_makes_two_groups(plane: DataPlane) -> None:
    """E10: the same prompt in two epochs, a retry, two collectors: two groups of 4, never one of 8."""
    await plane.register(contract_partition("epochs", size=4))
    first = contract_group(0, version=1, size=4, prompt=17)
    second = contract_group(8, version=1, size=4, prompt=17)
    retry = contract_group(9, version=1, size=4, prompt=17)
    half = {TOKENS: [torch.zeros(1), torch.zeros(1), "failed", torch.zeros(1)]}
    await refused(TypeError, plane.put("epochs", retry, half))
    async with anyio.create_task_group() as tasks:
        for group in (second, first, retry):
            tasks.start_soon(put_groups, plane, "epochs", [group])
    claim = await claim_groups(plane, "epochs")
    assert rows_of(claim) == [first.row, second.row, retry.row]
    assert {len(set(group.keys)) for group in claim.groups} == {4}
    assert len({key for group in claim.groups for key in group.keys}) == 12
    assert [group.prompt for group in claim.groups] == [17, 17, 17]
    for group in claim.groups:
        assert {v[0].item() for v in await read_one(plane, "epochs", group)} == {group.group}


async def a_claimer_cannot_change_the_store_by_its_copy(plane: DataPlane) -> None:
    await plane.register(contract_partition("copies"))
    rewards = [0.0, 1.0]
    tokens = [torch.zeros(2), torch.zeros(2)]
    group = contract_group(0, reward=rewards)
    await plane.put("copies", group, {TOKENS: tokens})
    rewards[0] = 99.0
    tokens[0].fill_(99)
    first = await claim_groups(plane, "copies")
    first.groups[0].tags["reward"][1] = 99.0
    (await read_one(plane, "copies", group))[1].fill_(99)
    await plane.give_back(first.lease)
    assert (await claim_groups(plane, "copies")).groups[0].rewards == (0.0, 1.0)
    assert torch.stack(await read_one(plane, "copies", group)).tolist() == [[0, 0], [0, 0]]


def _awkward_columns() -> Mapping[str, list[torch.Tensor]]:
    odd = torch.tensor([math.inf, -math.inf, -0.0, math.nan, 1e-40, 3.14], dtype=torch.bfloat16)
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "ragged": [torch.arange(n, dtype=torch.int64) for n in (3, 1, 5)],
        "equal": [torch.full((4,), n, dtype=torch.int32) for n in range(3)],
        "one_element": [torch.tensor([n]) for n in range(3)],
        "scalar": [torch.tensor(n, dtype=torch.float64) for n in range(3)],
        "empty": [torch.zeros(0, dtype=torch.float16) for _ in range(3)],
        "some_empty": [torch.zeros(0), torch.ones(2), torch.zeros(0)],
        "bfloat16": [odd, odd[:0], odd[2:5]],
        "strided": [wide[:, 1], wide[::2, ::3], wide.T[1:3]],
        "bool": [torch.tensor([True, False, True])[:n] for n in (3, 1, 2)],
        "int8": [torch.tensor([-128, 127], dtype=torch.int8)] * 3,
        "uint8": [torch.tensor([0, 255], dtype=torch.uint8)] * 3,
        "matrix": [torch.randn(n, 3, 2) for n in (2, 0, 1)],
        "with_gradient": [torch.ones(2, requires_grad=True)] * 3,
    }


async def tensors_come_back_bit_by_bit(plane: DataPlane) -> None:
    """E7, E11: values, dtype and shape of a row are what was put, whatever its neighbours are like."""
    awkward = _awkward_columns()
    await plane.register(contract_partition("bits", size=3, columns=tuple(awkward)))
    group = contract_group(0, size=3)
    await plane.put("bits", group, awkward)
    values = await plane.read("bits", group.keys, tuple(awkward))
    for name, column in awkward.items():
        for i, (got, put) in enumerate(zip(values[name], column, strict=True)):
            assert same_bits(got, put.detach()), f"{name} row {i}: {got} is not {put}"
    alone = await plane.read("bits", group.keys[1:2], ("ragged", "scalar"))
    assert alone["ragged"][0].shape == (1,)
    assert alone["scalar"][0].shape == ()


async def objects_come_back_one_a_row(plane: DataPlane) -> None:
    """E8: the type of the first object decides nothing."""
    columns: dict[str, list[Any]] = {
        "objects": ["a", None, {"x": [1, 2.5, b"raw", True]}],
        "lists": [[1], [], [[2]]],
        "numbers": [0, -(2**63), 1.5],
    }
    await plane.register(contract_partition("objects", size=3, columns=tuple(columns), objects=tuple(columns)))
    await plane.register(contract_partition("object", size=1, columns=("one",), objects=("one",)))
    group, single = contract_group(0, size=3), contract_group(0, size=1)
    await plane.put("objects", group, columns)
    await plane.put("object", single, {"one": [["a"]]})
    assert await plane.read("objects", group.keys, tuple(columns)) == columns
    assert await plane.read("object", single.keys, ("one",)) == {"one": [["a"]]}


async def a_cancelled_put_is_whole_or_leaves_nothing(plane: DataPlane) -> None:
    await plane.register(contract_partition("cancelled"))
    for number in range(20):
        group = contract_group(number)
        with anyio.move_on_after(number * 0.0004):
            await put_groups(plane, "cancelled", [group])
            continue
        assert group.keys[0] not in await plane.keys("cancelled")
        await put_groups(plane, "cancelled", [group])
    assert len((await claim_groups(plane, "cancelled")).groups) == 20


async def a_second_put_cut_short_leaves_the_first(plane: DataPlane) -> None:
    await plane.register(contract_partition("doubled_late"))
    group = contract_group(0)
    await put_groups(plane, "doubled_late", [group])
    for number in range(10):
        with anyio.move_on_after(number * 0.0004), suppress(DataPlaneError):
            await plane.put("doubled_late", group, {TOKENS: [torch.zeros(9)] * 2})
        assert [v.tolist() for v in await read_one(plane, "doubled_late", group)] == [[0, 0], [0, 1, 0]]


async def a_full_store_refuses_and_keeps_nothing_until_there_is_room(plane: DataPlane) -> None:
    await plane.register(contract_partition("full"))
    groups = [contract_group(n) for n in range(3)]
    await put_groups(plane, "full", groups[:FULL_AT_ROWS])
    await refused(StoreFull, put_groups(plane, "full", groups[2:]), groups[2].row)
    assert sorted(await plane.keys("full")) == sorted((*groups[0].keys, *groups[1].keys))
    await refused(MissingRows, read_one(plane, "full", groups[2]), groups[2].keys[0])
    # Refused for want of room, or because it is there: either way it stays.
    await refused(DataPlaneError, put_groups(plane, "full", groups[:1]), groups[0].row)
    assert [v[0].item() for v in await read_one(plane, "full", groups[0])] == [0, 0]
    claim = await claim_groups(plane, "full", 1)
    await plane.clear("full", groups[0].keys, lease=claim.lease)
    await put_groups(plane, "full", groups[2:])
    assert [v[0].item() for v in await read_one(plane, "full", groups[2])] == [2, 2]
    await plane.clear("full", await plane.keys("full"))


PUTS = (
    what_is_put_is_claimed_and_read_as_it_was,
    a_read_crosses_groups_and_takes_only_what_it_names,
    a_read_names_what_is_missing_and_never_answers_less,
    a_row_put_again_after_its_clear_is_a_new_row,
    a_row_put_twice_is_refused_and_the_first_stays,
    what_does_not_fit_is_refused_at_the_put_and_leaves_nothing,
    a_column_of_another_kind_than_declared_is_refused,
    one_prompt_twice_makes_two_groups,
    a_claimer_cannot_change_the_store_by_its_copy,
    tensors_come_back_bit_by_bit,
    objects_come_back_one_a_row,
    a_cancelled_put_is_whole_or_leaves_nothing,
    a_second_put_cut_short_leaves_the_first,
)

FULL_STORE = (a_full_store_refuses_and_keeps_nothing_until_there_is_room,)
