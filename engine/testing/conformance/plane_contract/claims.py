"""Claims: order, owners, numbers, what is given back and what is lost."""

from asyncrl.engine.data_plane.base import Consumption, DataPlane, Lease
from asyncrl.engine.errors import ClaimLost, MissingRows
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    TRAINER,
    claim_groups,
    contract_group,
    contract_partition,
    put_groups,
    read_one,
    refused,
    rows_of,
)


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
    await plane.clear("idempotent", first.groups[0].keys, lease=first.lease)
    again = await claim_groups(plane, "idempotent", 2, claim_id="once")
    assert (again.fence, again.groups) == (first.fence, first.groups[1:])
    assert rows_of(await claim_groups(plane, "idempotent", claim_id="twice")) == ["v0_p2"]


async def what_is_given_back_is_ready_again_under_a_new_fence(plane: DataPlane) -> None:
    await plane.register(contract_partition("give_back"))
    await put_groups(plane, "give_back", [contract_group(n) for n in range(3)])
    first = await claim_groups(plane, "give_back")
    part = Lease("give_back", TRAINER, {"v0_p1": first.fence})
    await plane.give_back(part)
    assert await plane.leased(first.lease) == {"v0_p0", "v0_p2"}
    second = await claim_groups(plane, "give_back")
    assert rows_of(second) == ["v0_p1"]
    assert second.fence > first.fence
    # Given back a second time, by one who no longer holds it: ignored.
    await plane.give_back(part)
    assert await plane.leased(second.lease) == {"v0_p1"}
    assert await plane.leased(part) == frozenset()


async def a_reaped_owner_holds_nothing_and_others_keep_theirs(plane: DataPlane) -> None:
    await plane.register(contract_partition("reap"))
    await put_groups(plane, "reap", [contract_group(n) for n in range(4)])
    dead = await claim_groups(plane, "reap", 2, owner="dead", claim_id="dead/0")
    living = await claim_groups(plane, "reap", 1, owner="living")
    assert sorted(await plane.reap("reap", ["dead"])) == ["v0_p0", "v0_p1"]
    assert await plane.reap("reap", ["dead"]) == []
    assert await plane.leased(dead.lease) == frozenset()
    assert await plane.leased(living.lease) == {"v0_p2"}
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
    await plane.give_back(lost.lease)
    taken = await claim_groups(plane, "fence", 1, owner="heir")
    both = Lease("fence", TRAINER, {**lost.lease.fences, **kept.lease.fences})
    keys = [key for group in groups for key in group.keys]
    await refused(ClaimLost, plane.clear("fence", keys, lease=both), "v0_p0")
    await refused(ClaimLost, plane.renew(both), "v0_p0")
    # A lease that does not name the group is as lost as an old one.
    await refused(ClaimLost, plane.clear("fence", groups[0].keys, lease=kept.lease), "v0_p0")
    assert sorted(await plane.keys("fence")) == sorted(keys)
    assert await plane.leased(taken.lease) == {"v0_p0"}
    assert len(await read_one(plane, "fence", groups[1])) == 2
    await plane.renew(taken.lease)
    await plane.clear("fence", groups[0].keys, lease=taken.lease)
    await plane.clear("fence", groups[1].keys, lease=kept.lease)
    assert await plane.keys("fence") == []
    # What is cleared already can be cleared again under the old numbers.
    await plane.clear("fence", keys, lease=both)


async def claimed_rows_stay_readable_until_cleared(plane: DataPlane) -> None:
    await plane.register(contract_partition("readable"))
    group = contract_group(0)
    await put_groups(plane, "readable", [group])
    claim = await claim_groups(plane, "readable")
    assert len(await read_one(plane, "readable", group)) == 2
    await plane.clear("readable", group.keys, lease=claim.lease)
    await refused(MissingRows, read_one(plane, "readable", group), group.keys[0])


CLAIMS = (
    claims_go_by_version_and_then_by_dispatch,
    a_claim_takes_up_to_n_and_never_waits,
    consumers_claim_independently,
    the_same_claim_id_gives_the_same_claim,
    what_is_given_back_is_ready_again_under_a_new_fence,
    a_reaped_owner_holds_nothing_and_others_keep_theirs,
    a_claim_lost_to_another_owner_clears_nothing_and_renews_nothing,
    claimed_rows_stay_readable_until_cleared,
)
