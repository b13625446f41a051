"""What every DataPlane must do, as one suite: async functions of a plane, named as sentences.

Tests parametrize over `CONTRACT`, and over `FULL_STORE_CONTRACT` with planes that hold two rows.
Each function has a partition of its own, so that they can share a plane.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import torch

from asyncrl.engine.data_plane.base import Claim, Column, Consumption, DataPlane, Holding, Partition
from asyncrl.engine.errors import ClaimLost, DataPlaneError, MissingRows, StoreFull, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys

ContractTest = Callable[[DataPlane], Awaitable[None]]

TOKENS = "tokens"
TRAINER = "trainer"
# The capacity, in rows, of the planes that FULL_STORE_CONTRACT is for.
FULL_AT_ROWS = 2

_claim_numbers = itertools.count()


def contract_partition(
    name: str, *, size: int = 2, columns: Sequence[str] = (TOKENS,), consumers: Sequence[str] = (TRAINER,)
) -> Partition:
    return Partition(name, size, tuple(columns), tuple(consumers))


def contract_group(number: int, *, version: int = 0, size: int = 2, **tags: Any) -> GroupMeta:
    """Build a group whose keys are minted as a collector mints them."""
    return GroupMeta(sample_keys(version, number, size), {"group": number, "version": version, **tags})


def contract_columns(group: GroupMeta) -> dict[str, list[torch.Tensor]]:
    """Return tokens that tell one key from any other, of different lengths."""
    return {TOKENS: [torch.tensor([group.tags["group"], i, *range(i)], dtype=torch.int32) for i in range(group.size)]}


async def put_groups(plane: DataPlane, partition: str, groups: Sequence[GroupMeta]) -> None:
    for group in groups:
        await plane.put(partition, group, contract_columns(group))


async def claim_groups(
    plane: DataPlane,
    partition: str,
    max_groups: int = 100,
    *,
    owner: str = "owner",
    claim_id: str | None = None,
    consumer: str = TRAINER,
    columns: Sequence[str] = (TOKENS,),
) -> Claim:
    return await plane.claim(
        partition,
        consumer,
        columns=columns,
        max_groups=max_groups,
        owner=owner,
        claim_id=claim_id or f"{owner}/{next(_claim_numbers)}",
    )


async def refused(error: type[Exception], call: Awaitable[Any], *words: str) -> None:
    """Assert that `call` raises `error` and that the message has all `words`."""
    try:
        answer = await call
    except error as raised:
        message = repr(raised)
    else:
        raise AssertionError(f"{error.__name__} was expected; the answer was {answer!r}")
    missing = [word for word in words if word not in message]
    assert not missing, f"{message} does not name {missing}"


def rows_of(claim: Claim) -> list[str]:
    return [group.row for group in claim.groups]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether dtype, shape and every bit agree, NaN payloads and signs of zero included."""
    return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


async def read_one(plane: DataPlane, partition: str, group: GroupMeta, column: str = TOKENS) -> list[Any]:
    return (await plane.read(partition, group.keys, (column,)))[column]


async def what_is_put_is_claimed_and_read_as_it_was(plane: DataPlane) -> None:
    await plane.register(contract_partition("round_trip", columns=(TOKENS, "notes")))
    group = contract_group(7, version=3, reward=[0.5, math.inf], status=["finished", "failed"], dataset="d", none=None)
    columns: dict[str, list[Any]] = {**contract_columns(group), "notes": ["a", {"x": [1, None]}]}
    await plane.put("round_trip", group, columns)
    (claimed,) = (await claim_groups(plane, "round_trip", columns=(TOKENS, "notes"))).groups
    assert claimed == group
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


async def claims_go_by_version_and_then_by_dispatch(plane: DataPlane) -> None:
    await plane.register(contract_partition("order"))
    order = [(2, 5), (10, 3), (1, 12), (1, 4), (2, 11)]
    await put_groups(plane, "order", [contract_group(number, version=version) for version, number in order])
    first = await claim_groups(plane, "order", 2)
    rest = await claim_groups(plane, "order")
    assert rows_of(first) == ["v1_p4", "v1_p12"]
    assert rows_of(rest) == ["v2_p5", "v2_p11", "v10_p3"]
    assert rest.fence > first.fence


async def a_claim_takes_up_to_n_and_never_waits(plane: DataPlane) -> None:
    await plane.register(contract_partition("up_to_n"))
    assert (await claim_groups(plane, "up_to_n", 4)).groups == ()
    await put_groups(plane, "up_to_n", [contract_group(n) for n in range(3)])
    assert len((await claim_groups(plane, "up_to_n", 2)).groups) == 2
    assert len((await claim_groups(plane, "up_to_n", 2)).groups) == 1
    assert (await claim_groups(plane, "up_to_n", 2)).groups == ()


async def consumers_claim_independently(plane: DataPlane) -> None:
    await plane.register(contract_partition("consumers", consumers=("a", "b")))
    await put_groups(plane, "consumers", [contract_group(n) for n in range(2)])
    assert rows_of(await claim_groups(plane, "consumers", 1, consumer="a")) == ["v0_p0"]
    assert rows_of(await claim_groups(plane, "consumers", consumer="b")) == ["v0_p0", "v0_p1"]
    assert await plane.consumption("consumers", "a") == Consumption(ready=1, claimed=1)
    assert await plane.consumption("consumers", "b") == Consumption(ready=0, claimed=2)
    await plane.reap("consumers", ["nobody"])
    assert rows_of(await claim_groups(plane, "consumers", consumer="a")) == ["v0_p1"]


async def the_same_claim_id_gives_the_same_claim(plane: DataPlane) -> None:
    await plane.register(contract_partition("idempotent"))
    await put_groups(plane, "idempotent", [contract_group(n) for n in range(3)])
    first = await claim_groups(plane, "idempotent", 2, claim_id="once")
    assert await claim_groups(plane, "idempotent", 2, claim_id="once") == first
    await plane.clear("idempotent", first.groups[0].keys, holding=first.holding)
    again = await claim_groups(plane, "idempotent", 2, claim_id="once")
    assert (again.fence, again.groups) == (first.fence, first.groups[1:])
    assert rows_of(await claim_groups(plane, "idempotent", claim_id="twice")) == ["v0_p2"]


async def what_is_given_back_is_ready_again_under_a_new_fence(plane: DataPlane) -> None:
    await plane.register(contract_partition("give_back"))
    await put_groups(plane, "give_back", [contract_group(n) for n in range(3)])
    first = await claim_groups(plane, "give_back")
    part = Holding("give_back", TRAINER, {"v0_p1": first.fence})
    await plane.give_back(part)
    assert await plane.held(first.holding) == {"v0_p0", "v0_p2"}
    second = await claim_groups(plane, "give_back")
    assert rows_of(second) == ["v0_p1"]
    assert second.fence > first.fence
    # Given back a second time, by one who no longer holds it: ignored.
    await plane.give_back(part)
    assert await plane.held(second.holding) == {"v0_p1"}
    assert await plane.held(part) == frozenset()


async def a_reaped_owner_holds_nothing_and_others_keep_theirs(plane: DataPlane) -> None:
    await plane.register(contract_partition("reap"))
    await put_groups(plane, "reap", [contract_group(n) for n in range(4)])
    dead = await claim_groups(plane, "reap", 2, owner="dead", claim_id="dead/0")
    living = await claim_groups(plane, "reap", 1, owner="living")
    assert sorted(await plane.reap("reap", ["dead"])) == ["v0_p0", "v0_p1"]
    assert await plane.reap("reap", ["dead"]) == []
    assert await plane.held(dead.holding) == frozenset()
    assert await plane.held(living.holding) == {"v0_p2"}
    # The dead owner's calls, answered late: they take nothing.
    for claim_id in ("dead/0", "dead/1"):
        await refused(ClaimLost, claim_groups(plane, "reap", 2, owner="dead", claim_id=claim_id), "dead", "reap")
    assert rows_of(await claim_groups(plane, "reap", owner="living")) == ["v0_p0", "v0_p1", "v0_p3"]


async def a_claim_lost_to_another_owner_clears_nothing_and_renews_nothing(plane: DataPlane) -> None:
    await plane.register(contract_partition("fence"))
    groups = [contract_group(n) for n in range(2)]
    await put_groups(plane, "fence", groups)
    lost = await claim_groups(plane, "fence", 1, owner="zombie")
    kept = await claim_groups(plane, "fence", 1, owner="zombie")
    await plane.give_back(lost.holding)
    taken = await claim_groups(plane, "fence", 1, owner="heir")
    both = Holding("fence", TRAINER, {**lost.holding.fences, **kept.holding.fences})
    keys = [key for group in groups for key in group.keys]
    await refused(ClaimLost, plane.clear("fence", keys, holding=both), "v0_p0")
    await refused(ClaimLost, plane.renew(both), "v0_p0")
    # A holding that does not name the group is as lost as an old one.
    await refused(ClaimLost, plane.clear("fence", groups[0].keys, holding=kept.holding), "v0_p0")
    assert sorted(await plane.keys("fence")) == sorted(keys)
    assert await plane.held(taken.holding) == {"v0_p0"}
    assert len(await read_one(plane, "fence", groups[1])) == 2
    await plane.renew(taken.holding)
    await plane.clear("fence", groups[0].keys, holding=taken.holding)
    await plane.clear("fence", groups[1].keys, holding=kept.holding)
    assert await plane.keys("fence") == []
    # What is cleared already can be cleared again under the old numbers.
    await plane.clear("fence", keys, holding=both)


async def claimed_rows_stay_readable_until_cleared(plane: DataPlane) -> None:
    await plane.register(contract_partition("readable"))
    group = contract_group(0)
    await put_groups(plane, "readable", [group])
    claim = await claim_groups(plane, "readable")
    assert len(await read_one(plane, "readable", group)) == 2
    await plane.clear("readable", group.keys, holding=claim.holding)
    await refused(MissingRows, read_one(plane, "readable", group), group.keys[0])


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
    await plane.register(contract_partition("readiness"))
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


async def a_read_names_what_is_missing_and_never_answers_less(plane: DataPlane) -> None:
    await plane.register(contract_partition("strict"))
    group = contract_group(0)
    await put_groups(plane, "strict", [group])
    for stranger in ("v0_p1_g0", "v1_p0_g0", "v0_p0_g2", "no key at all"):
        await refused(MissingRows, plane.read("strict", (group.keys[0], stranger), (TOKENS,)), stranger)
    await refused(MissingRows, plane.read("strict", group.keys, (TOKENS, "nothing")), group.keys[0], "nothing")


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
    await plane.clear("torn", groups[1].keys[:1], holding=claim.holding)
    assert await plane.consumption("torn", TRAINER) == Consumption(ready=0, claimed=1)
    await plane.give_back(claim.holding)
    assert (await claim_groups(plane, "torn")).groups == ()


async def the_groups_of_a_partition_are_the_whole_ones_claimed_or_not(plane: DataPlane) -> None:
    await plane.register(contract_partition("listed"))
    groups = [contract_group(n, reward=[0.0, 1.0]) for n in range(4)]
    await put_groups(plane, "listed", groups)
    await plane.write("listed", "adv", dict.fromkeys(groups[1].keys, 1), writer="rank0")
    await claim_groups(plane, "listed", 1)
    await plane.clear("listed", (*groups[2].keys, groups[3].keys[0]))
    assert sorted(await plane.groups("listed"), key=lambda group: group.group) == groups[:2]


async def a_row_put_again_after_its_clear_is_a_new_row(plane: DataPlane) -> None:
    await plane.register(contract_partition("again"))
    group = contract_group(0)
    await put_groups(plane, "again", [group])
    old = await claim_groups(plane, "again")
    await plane.clear("again", group.keys, holding=old.holding)
    await put_groups(plane, "again", [group])
    assert await plane.held(old.holding) == frozenset()
    new = await claim_groups(plane, "again")
    assert rows_of(new) == [group.row]
    await refused(ClaimLost, plane.clear("again", group.keys, holding=old.holding), group.row)
    assert len(await read_one(plane, "again", group)) == 2


async def a_row_put_twice_is_refused_and_the_first_stays(plane: DataPlane) -> None:
    await plane.register(contract_partition("doubled"))
    group = contract_group(0)
    await put_groups(plane, "doubled", [group])
    claim = await claim_groups(plane, "doubled")
    await refused(DataPlaneError, plane.put("doubled", group, {TOKENS: [torch.zeros(9)] * 2}), group.row)
    assert await plane.held(claim.holding) == {group.row}
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
        "object not plain": (TypeError, group, {TOKENS: [{1, 2}, None]}),
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


async def a_partition_registers_again_as_it_is_and_not_otherwise(plane: DataPlane) -> None:
    await plane.register(contract_partition("registered"))
    await put_groups(plane, "registered", [contract_group(0)])
    await plane.register(contract_partition("registered"))
    for other in (
        contract_partition("registered", size=3),
        contract_partition("registered", columns=("other",)),
        contract_partition("registered", consumers=(TRAINER, "more")),
    ):
        await refused(DataPlaneError, plane.register(other), "registered")
    await put_groups(plane, "registered", [contract_group(1)])
    assert len((await claim_groups(plane, "registered")).groups) == 2


async def unknown_partitions_and_consumers_are_errors(plane: DataPlane) -> None:
    await plane.register(contract_partition("known"))
    group = contract_group(0)
    holding = Holding("unknown", TRAINER, {group.row: 1})
    calls: Mapping[str, Callable[[], Awaitable[Any]]] = {
        "put": lambda: plane.put("unknown", group, contract_columns(group)),
        "claim": lambda: claim_groups(plane, "unknown"),
        "give_back": lambda: plane.give_back(holding),
        "renew": lambda: plane.renew(holding),
        "held": lambda: plane.held(holding),
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
    await plane.give_back(first.holding)
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
    await plane.register(contract_partition("objects", size=3, columns=tuple(columns)))
    await plane.register(contract_partition("object", size=1, columns=("one",)))
    group, single = contract_group(0, size=3), contract_group(0, size=1)
    await plane.put("objects", group, columns)
    await plane.put("object", single, {"one": [["a"]]})
    assert await plane.read("objects", group.keys, tuple(columns)) == columns
    assert await plane.read("object", single.keys, ("one",)) == {"one": [["a"]]}


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


async def concurrent_clears_take_their_own_groups_only(plane: DataPlane) -> None:
    """E2: of A, B, C, D, B is dropped and A meanwhile: C and D remain, whole."""
    await plane.register(contract_partition("drops"))
    a, b, c, d = (contract_group(n) for n in range(4))
    await put_groups(plane, "drops", [a, b, c, d])
    claim = await claim_groups(plane, "drops")
    async with anyio.create_task_group() as tasks:
        for group in (b, a):
            tasks.start_soon(lambda keys: plane.clear("drops", keys, holding=claim.holding), group.keys)
    assert sorted(await plane.keys("drops")) == sorted((*c.keys, *d.keys))
    await plane.give_back(claim.holding)
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
                await plane.clear("churn", group.keys, holding=claim.holding)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        for third in range(3):
            tasks.start_soon(produce, range(third, total, 3))
        tasks.start_soon(consume, "one")
        tasks.start_soon(consume, "two")
    assert sorted(seen) == list(range(total))
    assert await plane.keys("churn") == []


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


async def a_full_store_refuses_and_keeps_nothing_until_there_is_room(plane: DataPlane) -> None:
    await plane.register(contract_partition("full"))
    groups = [contract_group(n) for n in range(3)]
    await put_groups(plane, "full", groups[:FULL_AT_ROWS])
    await refused(StoreFull, put_groups(plane, "full", groups[2:]), groups[2].row)
    assert sorted(await plane.keys("full")) == sorted((*groups[0].keys, *groups[1].keys))
    await refused(MissingRows, read_one(plane, "full", groups[2]), groups[2].keys[0])
    claim = await claim_groups(plane, "full", 1)
    await plane.clear("full", groups[0].keys, holding=claim.holding)
    await put_groups(plane, "full", groups[2:])
    assert [v[0].item() for v in await read_one(plane, "full", groups[2])] == [2, 2]
    await plane.clear("full", await plane.keys("full"))


CONTRACT: tuple[ContractTest, ...] = (
    what_is_put_is_claimed_and_read_as_it_was,
    a_read_crosses_groups_and_takes_only_what_it_names,
    claims_go_by_version_and_then_by_dispatch,
    a_claim_takes_up_to_n_and_never_waits,
    consumers_claim_independently,
    the_same_claim_id_gives_the_same_claim,
    what_is_given_back_is_ready_again_under_a_new_fence,
    a_reaped_owner_holds_nothing_and_others_keep_theirs,
    a_claim_lost_to_another_owner_clears_nothing_and_renews_nothing,
    claimed_rows_stay_readable_until_cleared,
    later_columns_come_from_several_writers,
    a_writer_cannot_overwrite_what_it_or_the_put_brought,
    a_group_is_ready_when_the_later_column_has_all_its_keys,
    later_columns_go_with_their_group,
    a_read_names_what_is_missing_and_never_answers_less,
    clearing_twice_is_clearing_once,
    cleared_keys_are_gone_at_once_and_the_row_with_the_last,
    a_group_with_a_cleared_key_is_never_claimed,
    the_groups_of_a_partition_are_the_whole_ones_claimed_or_not,
    a_row_put_again_after_its_clear_is_a_new_row,
    a_row_put_twice_is_refused_and_the_first_stays,
    what_does_not_fit_is_refused_at_the_put_and_leaves_nothing,
    a_partition_registers_again_as_it_is_and_not_otherwise,
    unknown_partitions_and_consumers_are_errors,
    partitions_do_not_see_each_other,
    a_claimer_cannot_change_the_store_by_its_copy,
    tensors_come_back_bit_by_bit,
    objects_come_back_one_a_row,
    one_prompt_twice_makes_two_groups,
    concurrent_clears_take_their_own_groups_only,
    puts_claims_and_clears_at_once_lose_nothing_and_repeat_nothing,
    a_cancelled_put_is_whole_or_leaves_nothing,
)

FULL_STORE_CONTRACT: tuple[ContractTest, ...] = (a_full_store_refuses_and_keeps_nothing_until_there_is_room,)
