"""Who holds which group: claims with leases, cleared keys, later columns.

A pure state machine over the rows of a store, run by whoever has them in one thread: inside
TransferQueue's controller (sampler.py) or in this process (local.py).

Invariant: a row is ready for a consumer, or leased to exactly one claim of it, or gone.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.engine.data_plane.leases import Leases, RowLease
from asyncrl.engine.data_plane.own_rows import OwnRows, Tags
from asyncrl.engine.data_plane.watched import Rows
from asyncrl.engine.errors import ClaimLost, DataPlaneError, MissingRows
from asyncrl.engine.records.keys import is_sample_key, row_of

_REMEMBERED_CLAIMS = 4096
_REMEMBERED_DEAD = 4096
_NAMED_ROWS = 8
"""A claim names at most this many rows that were passed over; `consumption` counts all."""


class Book:
    """The books of all partitions of a store."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 600.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._fences = itertools.count(1)
        self._books: dict[str, PartitionBook] = {}

    def register(self, partition: str, spec: Mapping[str, Any]) -> None:
        """Register a partition; DataPlaneError if it exists with another shape."""
        if partition not in self._books:
            self._books[partition] = PartitionBook(
                partition, spec, fences=self._fences, clock=self._clock, lease_s=self._lease_s
            )
        known = dict(self._books[partition].spec())
        if known != dict(spec):
            raise DataPlaneError(f"partition {partition!r} exists as {known}, not as {spec}")

    def of(self, partition: str, rows: Rows) -> "PartitionBook":
        """Return the book of a partition, after a look at its rows; DataPlaneError if it was not registered."""
        book = self._books.get(partition)
        if book is None:
            raise DataPlaneError(f"partition {partition!r} is not registered; it knows {sorted(self._books)}")
        book.look(rows)
        return book


class PartitionBook:
    """The claims and clears of one partition. `look` comes before every operation."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        *,
        fences: Iterator[int],
        clock: Callable[[], float],
        lease_s: float,
    ) -> None:
        self._name = name
        self._spec = dict(spec)
        self._fences = fences
        self._clock = clock
        self._lease_s = lease_s
        self._rows = OwnRows(spec.get("group_size", 0), clock, lease_s)
        self._leases: dict[str, Leases] = {}
        self._claims: OrderedDict[tuple[str, str], int] = OrderedDict()
        # Owners declared dead. A late claim of theirs would take groups that nobody would ever train.
        self._dead: OrderedDict[str, None] = OrderedDict()
        # By row: the put of the row, and its cleared keys.
        self._cleared: dict[str, tuple[str, set[str]]] = {}
        # Rows to delete. By put: until when the deletion of a row is left to the client that was given it.
        self._left: dict[str, None] = {}
        self._deleting: dict[str, float] = {}

    def look(self, rows: Rows) -> None:
        """Follow what changed in the store since the last look."""
        for name, before in self._rows.look(rows):
            after = self._rows.get(name)
            group = (after or before or {}).get("of")
            if group is None:
                self._follow_group(name, after)
            elif after is not None:
                self._note_left(name)
                if group in self._rows:
                    self._offer(group)

    def spec(self) -> Mapping[str, Any]:
        """Return the partition as it was registered."""
        return self._spec

    def claim(
        self, consumer: str, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> dict[str, Any]:
        """Lease up to `max_groups` ready groups; see DataPlane.claim."""
        leases = self._leases_of(consumer)
        if owner in self._dead:
            raise ClaimLost(f"owner {owner!r} of {self._name!r} was declared dead and claims nothing any more")
        known = self._claims.get((consumer, claim_id))
        if known is not None:
            names = [name for name, lease in leases.items() if lease.fence == known]
            return {"fence": known, "rows": {name: self._rows[name] for name in names}, "passed_over": {}}
        later = tuple(self._later_columns(columns))
        now, fence = self._clock(), next(self._fences)
        names = leases.take(
            max_groups,
            lambda name: RowLease(self._rows[name]["put"], fence, owner, now + self._lease_s),
            now=now,
            later=later,
            is_whole=lambda name: not self._cleared_keys(name) and self._has(name, later),
        )
        if names:
            self._claims[(consumer, claim_id)] = fence
            while len(self._claims) > _REMEMBERED_CLAIMS:
                self._claims.popitem(last=False)
        passed_over = self._rows.some_passed_over(_NAMED_ROWS)
        return {"fence": fence, "rows": {name: self._rows[name] for name in names}, "passed_over": passed_over}

    def give_back(self, consumer: str, fences: Mapping[str, int]) -> None:
        for name in self.leased(consumer, fences):
            self._leases[consumer].give_back(name)

    def renew(self, consumer: str, fences: Mapping[str, int]) -> None:
        self._check_leased(consumer, fences)
        for name in self.leased(consumer, fences):
            self._leases[consumer].renew(name, self._clock() + self._lease_s)

    def leased(self, consumer: str, fences: Mapping[str, int]) -> list[str]:
        return self._leases[consumer].under(fences) if consumer in self._leases else []

    def reap(self, owners: Sequence[str]) -> list[str]:
        for owner in owners:
            self._dead[owner] = None
        while len(self._dead) > _REMEMBERED_DEAD:
            self._dead.popitem(last=False)
        freed = []
        for leases in self._leases.values():
            for name in [name for name, lease in leases.items() if lease.owner in owners]:
                leases.give_back(name)
                freed.append(name)
        return freed

    def standing(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the rows of keys, and which put of each; MissingRows if a key is missing."""
        # Each row is looked up once, because a read asks for hundreds of keys.
        there: dict[str, set[str]] = {}
        standing: dict[str, str] = {}
        gone = []
        for key in keys:
            row = key.rpartition("_")[0]
            if row not in there:
                tags = self._rows.get(row)
                there[row] = set(tags["keys"]) - self._cleared_keys(row) if tags else set()
                standing[row] = tags["put"] if tags else ""
            if key not in there[row]:
                gone.append(key)
        if gone:
            raise MissingRows(f"{len(gone)} of {len(keys)} keys are not in {self._name!r}: {gone[:5]}")
        return standing

    def locate(self, keys: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
        """Return the rows to fetch, and which put of each, so that every column of every key is there.

        MissingRows if one is not.
        """
        brought = set(self._spec["columns"])
        standing = self.standing(keys)
        later = [column for column in columns if column not in brought]
        found = set(standing) if len(later) < len(columns) else set()
        for column in later:
            holders = {key: row for group in standing for key, row in self._rows.holders(group, column).items()}
            for key in keys:
                if key not in holders:
                    raise MissingRows(
                        f"{key} has no column {column!r} in {self._name!r}; a put brings {sorted(brought)}"
                    )
                found.add(holders[key])
        return {name: self._rows[name]["put"] for name in sorted(found)}

    def clear(self, keys: Sequence[str], consumer: str = "", fences: Mapping[str, int] | None = None) -> dict[str, str]:
        """Note keys as cleared; return rows, and which put of each, for the caller to delete in the store.

        A row goes with its last key. Keys that no row has are passed over: a second clear is a first one
        that finds nothing.
        """
        by_row: dict[str, set[str]] = {}
        for key in keys:
            row = row_of(key) if is_sample_key(key) else ""
            if row in self._rows and key in self._rows[row]["keys"]:
                by_row.setdefault(row, set()).add(key)
        if fences is not None:
            self._check_leased(consumer, {row: fences.get(row, 0) for row in by_row})
        for row, gone in by_row.items():
            self._cleared[row] = (self._rows[row]["put"], gone | self._cleared_keys(row))
            for name in (row, *self._rows.columns_of(row)):
                self._note_left(name)
        return self.leftovers()

    def leftovers(self) -> dict[str, str]:
        """Return rows without a key left, and later columns whose group is gone, for the caller to delete.

        Each is given to one caller: the store deletes by a place that it then uses again, so that a second
        deletion could take a stranger's row. What is still there after a lease's time is given to another.
        """
        left = {name: self._rows[name]["put"] for name in self._left if self._is_leftover(name)}
        self._left = dict.fromkeys(left)
        now = self._clock()
        deleting = {put: self._deleting.get(put, -math.inf) for put in left.values()}
        given = {name: put for name, put in left.items() if deleting[put] < now}
        self._deleting = deleting | dict.fromkeys(given.values(), now + self._lease_s)
        return given

    def consumption(self, consumer: str) -> dict[str, int]:
        """Count the groups that are whole and free, and those under a claim."""
        now = self._clock()
        held = {name for name, lease in self._leases_of(consumer).items() if not lease.is_free(now)}
        ready = sum(name not in held and not self._cleared_keys(name) for name in self._rows.groups())
        claimed = sum(not self._cleared_keys(name).issuperset(self._rows[name]["keys"]) for name in held)
        return {"ready": ready, "claimed": claimed, "passed_over": len(self._rows.passed_over)}

    def groups(self) -> list[Tags]:
        return [self._rows[name] for name in self._rows.groups() if not self._cleared_keys(name)]

    def keys(self) -> list[str]:
        return [
            key
            for name in self._rows.groups()
            for key in self._rows[name]["keys"]
            if key not in self._cleared_keys(name)
        ]

    def _follow_group(self, name: str, after: Tags | None) -> None:
        """Drop what was noted of an earlier put of this row, and offer the one that is there now."""
        put = after["put"] if after is not None else None
        if name in self._cleared and self._cleared[name][0] != put:
            del self._cleared[name]
        for leases in self._leases.values():
            leases.forget(name, put)
        for column in self._rows.columns_of(name):
            self._note_left(column)
        if after is not None:
            self._offer(name)

    def _offer(self, group: str) -> None:
        for leases in self._leases.values():
            leases.offer(group)

    def _note_left(self, name: str) -> None:
        if self._is_leftover(name):
            self._left[name] = None

    def _is_leftover(self, name: str) -> bool:
        tags = self._rows.get(name)
        if tags is None:
            return False
        if "of" not in tags:
            return self._cleared_keys(name).issuperset(tags["keys"])
        return self._rows.is_lost(name) or self._is_leftover(tags["of"])

    def _later_columns(self, columns: Sequence[str]) -> list[str]:
        """Return those of `columns` that come after the put; DataPlaneError if one is not declared."""
        later = [column for column in columns if column not in self._spec["columns"]]
        unknown = sorted(set(later).difference(self._spec["later"]))
        if unknown:
            raise DataPlaneError(
                f"partition {self._name!r} declares no column {', '.join(map(repr, unknown))}, so no group would "
                f"ever be ready; a put brings {list(self._spec['columns'])}, and later come {list(self._spec['later'])}"
            )
        return later

    def _has(self, group: str, later: Sequence[str]) -> bool:
        """Return whether every key of a group has all these later columns."""
        keys = self._rows[group]["keys"]
        return all(self._rows.holders(group, column).keys() >= set(keys) for column in later)

    def _cleared_keys(self, name: str) -> frozenset[str] | set[str]:
        """Return the cleared keys of the row that the store has now under `name`."""
        return self._cleared.get(name, ("", frozenset()))[1]

    def _leases_of(self, consumer: str) -> Leases:
        """Return the leases of a consumer; DataPlaneError if the partition has no such consumer."""
        if consumer not in self._spec["consumers"]:
            raise DataPlaneError(
                f"{consumer!r} is not a consumer of {self._name!r}; its consumers are {self._spec['consumers']}"
            )
        return self._leases.setdefault(consumer, Leases(self._rows))

    def _check_leased(self, consumer: str, fences: Mapping[str, int]) -> None:
        held = set(self.leased(consumer, fences))
        lost = [name for name in fences if name in self._rows and name not in held]
        if lost:
            raise ClaimLost(
                f"{len(lost)} of {len(fences)} claimed groups are no longer held by {consumer!r}: {lost[:5]}; "
                "another claimer has them, or they were given back; nothing was done"
            )
