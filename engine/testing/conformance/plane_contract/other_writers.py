"""Rows that the plane did not put: passed over, counted and named, whatever another writer left."""

from collections.abc import Mapping
from typing import Any

from asyncrl.engine.data_plane.base import Consumption, DataPlane
from asyncrl.engine.data_plane.rows import SCHEMA, column_row_tags, group_row_tags
from asyncrl.engine.errors import DataPlaneError, MissingRows
from asyncrl.engine.testing.conformance.plane_contract.groups import (
    TOKENS,
    TRAINER,
    claim_groups,
    contract_group,
    contract_partition,
    leave_row,
    put_groups,
    read_one,
    refused,
    rows_of,
)


def _strange_rows() -> Mapping[str, tuple[Mapping[str, Any], str]]:
    """Return, by row: tags that another writer may have left, and a word of why they are not ours."""
    good = group_row_tags(("v0_p5_g0", "v0_p5_g1"), (TOKENS,), {"version": 0, "group": 5})
    column = column_row_tags("v0_p0", "0" * 32, "adv", "rank0", ("v0_p0_g0",))

    def lacking(tags: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {tag: value for tag, value in tags.items() if tag != name}

    return {
        "somebody": ({"reward": 1.0}, "schema None"),
        "v0_p5": ({**good, "schema": SCHEMA + 1}, f"schema {SCHEMA + 1}"),
        "v0_p6": ({**lacking(good, "keys"), "row": "v0_p6"}, "keys"),
        "v0_p7": ({**good, "row": "v0_p7", "tags": {"group": 5}}, "version"),
        "v0_p8": ({**good, "row": "v0_p8", "tags": "none"}, "tags"),
        "v0_p9": ({**good, "row": "v0_p9", "keys": ["v0_p9_g0"]}, "1 keys"),
        "v0_p0#adv#rank0": (lacking(column, "of_put"), "of_put"),
        "v0_p0#adv#rank1": ({**column, "row": "v0_p0#adv#rank1", "keys": ["v0_p1_g0"]}, "v0_p1_g0"),
    }


async def rows_of_other_writers_are_passed_over_counted_and_named(plane: DataPlane) -> None:
    """FOUND-I12: a row without version or keys ended every claim of its partition with an unnamed KeyError."""
    await plane.register(contract_partition("strangers", later=("adv",)))
    group, strange = contract_group(0), _strange_rows()
    for name, (tags, _) in strange.items():
        await leave_row(plane, "strangers", name, tags)
    await put_groups(plane, "strangers", [group])
    await plane.write("strangers", "adv", dict.fromkeys(group.keys, 1), writer="rank2")
    claim = await claim_groups(plane, "strangers", columns=(TOKENS, "adv"))
    assert rows_of(claim) == [group.row]
    assert sorted(claim.passed_over) == sorted(strange)
    for name, (_, word) in strange.items():
        assert word in claim.passed_over[name], (name, claim.passed_over[name])
    counted = await plane.consumption("strangers", TRAINER)
    assert counted == Consumption(ready=0, claimed=1, passed_over=len(strange))
    assert await plane.keys("strangers") == list(group.keys)
    assert [found.keys for found in await plane.groups("strangers")] == [group.keys]
    assert (await plane.read("strangers", group.keys, ("adv",)))["adv"] == [1, 1]
    await refused(MissingRows, plane.read("strangers", ["v0_p5_g0"], (TOKENS,)), "v0_p5_g0")
    # Of what others left nothing is taken away, or overwritten.
    await plane.clear("strangers", group.keys, lease=claim.lease)
    assert (await plane.consumption("strangers", TRAINER)).passed_over == len(strange)
    await refused(DataPlaneError, put_groups(plane, "strangers", [contract_group(5)]), "v0_p5", "another writer")


async def a_row_is_ours_as_soon_as_its_tags_are(plane: DataPlane) -> None:
    await plane.register(contract_partition("mended"))
    group = contract_group(0)
    await put_groups(plane, "mended", [group])
    kept = group_row_tags(group.keys, (TOKENS,), group.tags)
    await leave_row(plane, "mended", group.row, {**kept, "schema": None})
    claim = await claim_groups(plane, "mended")
    assert (claim.groups, list(claim.passed_over)) == ((), [group.row])
    await leave_row(plane, "mended", group.row, kept)
    claim = await claim_groups(plane, "mended")
    assert (rows_of(claim), dict(claim.passed_over)) == ([group.row], {})


async def a_claim_of_a_column_that_nobody_declared_is_an_error(plane: DataPlane) -> None:
    """FOUND-I12: such a claim was empty, for ever."""
    await plane.register(contract_partition("declared", later=("adv",)))
    group = contract_group(0)
    await put_groups(plane, "declared", [group])
    await refused(
        DataPlaneError, claim_groups(plane, "declared", columns=(TOKENS, "advv")), "'declared'", "'advv'", TOKENS, "adv"
    )
    assert rows_of(await claim_groups(plane, "declared", columns=(TOKENS, "adv"))) == []
    assert len(await read_one(plane, "declared", group)) == 2
    assert rows_of(await claim_groups(plane, "declared")) == [group.row]


OTHER_WRITERS = (
    rows_of_other_writers_are_passed_over_counted_and_named,
    a_row_is_ours_as_soon_as_its_tags_are,
    a_claim_of_a_column_that_nobody_declared_is_an_error,
)
