"""The rows of a store that this version of asyncrl put; those of other writers are passed over and named.

Invariant: a row that is shown has all that the book reads of it, in the kinds it expects. A row is looked
at once for each of its tags, since every claim goes through all rows.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from asyncrl.engine.data_plane.base import check_group
from asyncrl.engine.data_plane.rows import SCHEMA
from asyncrl.engine.errors import AsyncRLError, DataPlaneError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import is_sample_key, row_of

Rows = Mapping[str, Mapping[str, Any]]

_SPARE_ROWS = 256

# A put names a file in shared memory: nothing but what uuid4().hex gives.
_Put = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class _GroupRow(msgspec.Struct):
    put: _Put
    keys: list[str]
    columns: list[str]
    tags: dict[str, Any]


class _ColumnRow(msgspec.Struct):
    put: _Put
    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    of: str
    of_put: _Put
    column: str


def fault_of(name: str, tags: Mapping[str, Any], group_size: int) -> str | None:
    """Say why a row cannot be one that this version put for groups of `group_size`; None if it can."""
    if not isinstance(tags, Mapping) or tags.get("schema") != SCHEMA:
        found = tags.get("schema") if isinstance(tags, Mapping) else tags
        return f"schema {found!r}, where rows of this version have {SCHEMA}"
    try:
        if "of" in tags:
            _check_column_row(name, msgspec.convert(tags, _ColumnRow))
        else:
            row = msgspec.convert(tags, _GroupRow)
            group = GroupMeta(tuple(row.keys), row.tags)
            check_group(group)
            if (group.row, group.size) != (name, group_size):
                return f"{group.size} keys of {group.row}, where a group has {group_size}"
    except (msgspec.ValidationError, AsyncRLError) as error:
        return str(error)
    return None


def _check_column_row(name: str, row: _ColumnRow) -> None:
    if not name.startswith(f"{row.of}#{row.column}#"):
        raise DataPlaneError(f"column {row.column!r} of {row.of}, which its name does not say")
    for key in row.keys:
        if not is_sample_key(key) or row_of(key) != row.of:
            raise DataPlaneError(f"the key {key!r}, which is not one of {row.of}")


class RowCheck:
    """What the rows of one partition were found to be."""

    def __init__(self, group_size: int, clock: Callable[[], float], patience_s: float) -> None:
        self._group_size = group_size
        self._clock = clock
        self._patience_s = patience_s
        self._own: dict[str, Mapping[str, Any]] = {}
        self._faults: dict[str, tuple[Mapping[str, Any], str]] = {}
        # Rows without tags of their own, and since when: a store may show a row before its tags.
        self._bare: dict[str, float] = {}

    @property
    def passed_over(self) -> dict[str, str]:
        """By row: why it was not taken for one of ours, at the last look."""
        return {name: why for name, (_, why) in self._faults.items()}

    def is_own(self, name: str, tags: Mapping[str, Any]) -> bool:
        # The very object that passed before: the store makes a new one for each write of tags.
        return self._own.get(name) is tags or self._passes(name, tags)

    def forget_all_but(self, names: Mapping[str, Any]) -> None:
        """Forget rows that are no longer there."""
        if len(self._own) > 2 * len(names) + _SPARE_ROWS:
            self._own = {name: tags for name, tags in self._own.items() if name in names}
        for seen in (self._faults, self._bare):
            for name in [name for name in seen if name not in names]:
                del seen[name]

    def _passes(self, name: str, tags: Mapping[str, Any]) -> bool:
        known, _ = self._faults.get(name, ({}, ""))
        if known is tags:
            return False
        fault = self._late(name, tags) if self._is_bare(name, tags) else fault_of(name, tags, self._group_size)
        self._faults.pop(name, None)
        if fault == "":
            return False
        self._bare.pop(name, None)
        if fault is None:
            self._own[name] = tags
            return True
        self._faults[name] = (tags, fault)
        return False

    def _is_bare(self, name: str, tags: Mapping[str, Any]) -> bool:
        # A late write of tags to a place that is used again shows the tags of the row before.
        return not tags or (isinstance(tags, Mapping) and tags.get("schema") == SCHEMA and tags.get("row") != name)

    def _late(self, name: str, tags: Mapping[str, Any]) -> str:
        """Return nothing while tags of the row's own may still come, and then the fault."""
        since = self._bare.setdefault(name, self._clock())
        return f"no tags of its own for {self._patience_s:g} s" if self._clock() - since > self._patience_s else ""


class OwnRows(Rows):
    """A view of `rows`, for the length of one operation, that shows what passes `check` alone."""

    def __init__(self, rows: Rows, check: RowCheck) -> None:
        self._rows = rows
        self._check = check

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        tags = self._rows[name]
        if not self._check.is_own(name, tags):
            raise KeyError(name)
        return tags

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def items(self) -> list[tuple[str, Mapping[str, Any]]]:  # type: ignore[override]
        """Return all at once: claims and clears go through every row."""
        is_own = self._check.is_own
        own = [(name, tags) for name, tags in self._rows.items() if is_own(name, tags)]
        self._check.forget_all_but(self._rows)
        return own

    def __len__(self) -> int:
        return len(self.items())
