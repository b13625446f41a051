"""The rows of a store that this version of asyncrl put; those of other writers are passed over and named.

Invariant: a row that is shown has all that the book reads of it, in the kinds it expects. A row is looked
at when it changed, and never else: an operation costs what it touches, and not what the partition holds.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from asyncrl.engine.data_plane.base import check_group
from asyncrl.engine.data_plane.rows import SCHEMA
from asyncrl.engine.data_plane.watched import Rows
from asyncrl.engine.errors import AsyncRLError, DataPlaneError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import is_sample_key, row_of

Tags = Mapping[str, Any]

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


class OwnRows(Mapping[str, Tags]):
    """The own rows of one partition at the last look: groups, and later columns by their group."""

    def __init__(self, group_size: int, clock: Callable[[], float], patience_s: float) -> None:
        self._group_size = group_size
        self._clock = clock
        self._patience_s = patience_s
        self._own: dict[str, Tags] = {}
        self._columns: dict[str, dict[str, None]] = {}
        self._faults: dict[str, tuple[Tags | None, str]] = {}
        # Rows without tags of their own, and since when, oldest first: a store may show a row before its tags.
        self._bare: dict[str, float] = {}

    def look(self, rows: Rows) -> list[tuple[str, Tags | None]]:
        """Look at what changed in the store; return the own rows that came, changed or went, each as it was before."""
        changed = []
        for name in rows.take_changed():
            before, after = self._own.get(name), self._passed(name, rows.get(name))
            if before is not after:
                self._keep(name, before, after)
                changed.append((name, before))
        self._give_up_on_bare(rows)
        return changed

    @property
    def passed_over(self) -> dict[str, str]:
        """By row: why it was not taken for one of ours, at the last look."""
        return {name: why for name, (_, why) in self._faults.items()}

    def some_passed_over(self, count: int) -> dict[str, str]:
        """Return at most `count` of `passed_over`."""
        return {name: why for name, (_, why) in itertools.islice(self._faults.items(), count)}

    def place(self, name: str) -> tuple[int, int, str]:
        """Return where a group stands in the order of claims: oldest version first, then in dispatch order."""
        tags = self._own[name]["tags"]
        return tags["version"], tags["group"], name

    def groups(self) -> Iterator[str]:
        """Iterate over the rows that hold a group."""
        return (name for name, tags in self._own.items() if "of" not in tags)

    def columns_of(self, group: str) -> tuple[str, ...]:
        """Return the rows of later columns of a group, also of earlier puts of it, and if it is gone."""
        return tuple(self._columns.get(group, ()))

    def is_lost(self, column: str) -> bool:
        """Return whether the group of a later column is gone, because its writer came late."""
        tags = self._own[column]
        return tags["of"] not in self._own or self._own[tags["of"]]["put"] != tags["of_put"]

    def holders(self, group: str, column: str) -> dict[str, str]:
        """Return, by key, the row that has this later column of a group."""
        rows = [name for name in self.columns_of(group) if self._own[name]["column"] == column]
        return {key: name for name in rows if not self.is_lost(name) for key in self._own[name]["keys"]}

    def __getitem__(self, name: str) -> Tags:
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def _keep(self, name: str, before: Tags | None, after: Tags | None) -> None:
        if before is not None and "of" in before:
            siblings = self._columns[before["of"]]
            siblings.pop(name, None)
            if not siblings:
                del self._columns[before["of"]]
        if after is None:
            del self._own[name]
            return
        self._own[name] = after
        if "of" in after:
            self._columns.setdefault(after["of"], {})[name] = None

    def _passed(self, name: str, tags: Tags | None) -> Tags | None:
        """Return the tags if they are of a row of ours; note why not else."""
        if tags is None:
            self._faults.pop(name, None)
            self._bare.pop(name, None)
            return None
        if self._is_bare(name, tags):
            if self._faults.get(name, (None, ""))[0] is not tags:
                self._faults.pop(name, None)
                self._bare.setdefault(name, self._clock())
            return None
        self._bare.pop(name, None)
        fault = None if self._own.get(name) is tags else fault_of(name, tags, self._group_size)
        if fault is None:
            self._faults.pop(name, None)
            return tags
        self._faults[name] = (tags, fault)
        return None

    def _is_bare(self, name: str, tags: Tags) -> bool:
        # A late write of tags to a place that is used again shows the tags of the row before.
        return not tags or (isinstance(tags, Mapping) and tags.get("schema") == SCHEMA and tags.get("row") != name)

    def _give_up_on_bare(self, rows: Rows) -> None:
        """Pass over rows for whose own tags the time is over."""
        for name, _ in list(itertools.takewhile(self._is_over, self._bare.items())):
            del self._bare[name]
            self._faults[name] = (rows.get(name), f"no tags of its own for {self._patience_s:g} s")

    def _is_over(self, bare: tuple[str, float]) -> bool:
        return self._clock() - bare[1] > self._patience_s
