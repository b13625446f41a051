"""Rows of a store: how they are named and tagged, and values in and out of them.

A group is one row. What a rank writes later is a row of its own, which names its group in its tags.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from asyncrl.engine.data_plane.base import Claim
from asyncrl.engine.data_plane.codec import decode_row
from asyncrl.engine.errors import DataPlaneError, MissingRows
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import STORED_AT
from asyncrl.engine.records.keys import row_of

SCHEMA = 1
"""The version of what stands in a row's tags; a row with another one is passed over by whoever reads."""


def group_row_tags(keys: Sequence[str], columns: Iterable[str], tags: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tags of a group's row; `put` tells this row from an earlier one of the same name."""
    plain = {name: list(value) if isinstance(value, list | tuple) else value for name, value in tags.items()}
    row = row_of(keys[0])
    own = {"schema": SCHEMA, "row": row, "put": uuid.uuid4().hex}
    return {**own, "keys": list(keys), "columns": sorted(columns), "tags": plain}


def stamped(tags: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """Return the tags of a row that is on `node`: a group's own tags say so, but for one that was stored before.

    A log has said where that one was: if it is put again, it goes by what the log says.
    """
    if "of" in tags or STORED_AT in tags["tags"]:
        return tags
    return {**tags, "tags": {**tags["tags"], STORED_AT: node}}


def column_row(row: str, column: str, writer: str) -> str:
    """Name the row in which `writer` adds a later column to a group."""
    return f"{row}#{column}#{writer}"


def column_row_tags(row: str, put: str, column: str, writer: str, keys: Sequence[str]) -> dict[str, Any]:
    """Build the tags of a later column's row; it belongs to one `put` of its group, and to no later one."""
    own = {"schema": SCHEMA, "row": column_row(row, column, writer), "put": uuid.uuid4().hex}
    return {**own, "of": row, "of_put": put, "column": column, "keys": list(keys)}


def repeats(earlier: Mapping[str, Any], tags: Mapping[str, Any]) -> bool:
    """Say whether a later column may take its row's place: it is written again, or that one's group is gone."""
    return "of" in tags and (earlier.get("keys") == tags["keys"] or earlier.get("of_put") != tags["of_put"])


def group_of(row_tags: Mapping[str, Any]) -> GroupMeta:
    """Build a GroupMeta from the tags of its row."""
    return GroupMeta(keys=tuple(row_tags["keys"]), tags=deepcopy(row_tags["tags"]))


def claim_of(reply: Mapping[str, Any], *, claim_id: str, partition: str, consumer: str, owner: str) -> Claim:
    """Build a Claim from a book's reply."""
    groups = tuple(map(group_of, reply["rows"].values()))
    return Claim(claim_id, partition, consumer, owner, reply["fence"], groups, reply["passed_over"])


def assemble(
    keys: Sequence[str], columns: Sequence[str], parts: Mapping[str, torch.Tensor], *, copy: bool = True
) -> dict[str, list[Any]]:
    """Order values out of encoded rows (`parts`: row name to buffer) by `keys`; views of them without `copy`."""
    found: dict[str, dict[str, Any]] = {column: {} for column in columns}
    for name, buffer in parts.items():
        row_keys, values = decode_row(buffer, name, columns, copy=copy)
        own = f"{name.partition('#')[0]}_g"
        strange = [key for key in row_keys if not key.startswith(own)]
        if strange:
            raise DataPlaneError(f"the bytes of row {name} are of other keys: {strange[:5]}")
        for column, column_values in values.items():
            found[column].update(zip(row_keys, column_values, strict=True))
    try:
        return {column: [by_key[key] for key in keys] for column, by_key in found.items()}
    except KeyError:
        lack = next((key, column) for column, by_key in found.items() for key in keys if key not in by_key)
        raise MissingRows(f"{lack[0]}: the bytes of its row hold no column {lack[1]!r} for it") from None


def split_by_row(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort values by key into values by row and key."""
    rows: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        rows.setdefault(row_of(key), {})[key] = value
    return rows


def already_there(name: str, partition: str, earlier: Mapping[str, Any]) -> DataPlaneError:
    """Build the refusal of a row whose name is taken; the earlier row stays."""
    if earlier.get("schema") != SCHEMA:
        return DataPlaneError(f"another writer has put a row {name} in {partition!r}, with tags {sorted(earlier)}")
    return DataPlaneError(
        f"{name} is already in {partition!r}, with keys {earlier.get('keys')}; a group is put once, "
        "and a writer brings all its keys of a group in one write"
    )
