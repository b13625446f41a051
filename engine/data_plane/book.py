"""Who holds which group: claims with leases, cleared keys, later columns.

A pure state machine over the rows of a store, run by whoever has them in one thread: inside
TransferQueue's controller (sampler.py) or in this process (local.py).

Invariant: a row is ready for a consumer, or leased to exactly one claim of it, or gone.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.engine.data_plane.own_rows import OwnRows, RowCheck, Rows
from asyncrl.engine.errors import ClaimLost, DataPlaneError, MissingRows
from asyncrl.engine.records.keys import is_sample_key, row_of

_REMEMBERED_CLAIMS = 4096
_REMEMBERED_DEAD = 4096
_NAMED_ROWS = 8
"""A claim names at most this many rows that were passed over; `consumption` counts all."""


def _is_lost(rows: Rows, tags: Mapping[str, Any]) -> bool:
    """Return whether the group of a later column is gone, because its writer came late."""
    return tags["of"] not in rows or rows[tags["of"]]["put"] != tags["of_put"]


def _holders(rows: Rows, columns: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return, by key and later column, the row that has it."""
    later = [
        (name, tags)
        for name, tags in rows.items()
        if "of" in tags and tags["column"] in columns and not _is_lost(rows, tags)
    ]
    return {(key, tags["column"]): name for name, tags in later for key in tags["keys"]}


@dataclass(slots=True)
class _RowLease:
    put: str
    fence: int
    owner: str
    expires: float

    def is_free(self, now: float, owner: str = "") -> bool:
        """Return whether `owner` may take the row. A lease that ran out is free for others; its own owner is alive."""
        return self.expires < now and self.owner != owner


class Book:
    """Claims of every partition and consumer. `rows` in each call is what the store shows now."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 600.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._fences = itertools.count(1)
        self._leases: dict[tuple[str, str], dict[str, _RowLease]] = {}
        self._claims: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        # By partition: owners declared dead. A late claim of theirs would take groups that nobody would ever train.
        self._dead: OrderedDict[tuple[str, str], None] = OrderedDict()
        # By partition and row: the put of the row, and its cleared keys.
        self._cleared: dict[str, dict[str, tuple[str, set[str]]]] = {}
        # By partition and put: until when the deletion of a row is left to the client that was given it.
        self._deleting: dict[str, dict[str, float]] = {}
        self._partitions: dict[str, Mapping[str, Any]] = {}
        self._checks: dict[str, RowCheck] = {}

    def own(self, rows: Rows, partition: str) -> Rows:
        """Return the rows of a store without those that other writers put; every call is to be given these."""
        size = self.spec(rows, partition).get("group_size", 0)
        check = self._checks.setdefault(partition, RowCheck(size, self._clock, self._lease_s))
        return OwnRows(rows, check)

    def _passed_over(self, partition: str) -> Mapping[str, str]:
        check = self._checks.get(partition)
        return check.passed_over if check else {}

    def register(self, partition: str, spec: Mapping[str, Any]) -> None:
        """Register a partition; DataPlaneError if it exists with another shape."""
        known = self._partitions.setdefault(partition, dict(spec))
        if dict(known) != dict(spec):
            raise DataPlaneError(f"partition {partition!r} exists as {known}, not as {spec}")

    def spec(self, rows: Rows, partition: str) -> Mapping[str, Any]:
        """Return a partition as it was registered; DataPlaneError if it was not."""
        spec = self._partitions.get(partition)
        if spec is None:
            raise DataPlaneError(f"partition {partition!r} is not registered; it knows {sorted(self._partitions)}")
        return spec

    def claim(
        self,
        rows: Rows,
        *,
        partition: str,
        consumer: str,
        columns: Sequence[str],
        max_groups: int,
        owner: str,
        claim_id: str,
    ) -> dict[str, Any]:
        """Lease up to `max_groups` ready groups; see DataPlane.claim."""
        self._check_consumer(rows, partition, consumer)
        if (partition, owner) in self._dead:
            raise ClaimLost(f"owner {owner!r} of {partition!r} was declared dead and claims nothing any more")
        leases = self._live_leases(rows, partition, consumer)
        now = self._clock()
        known = self._claims.get((partition, consumer, claim_id))
        if known is not None:
            names = [name for name, lease in leases.items() if lease.fence == known]
            return {"fence": known, "rows": {name: rows[name] for name in names}, "passed_over": {}}
        later = self._later_columns(rows, partition, columns)
        holders = _holders(rows, later) if later else {}
        cleared = self._cleared.get(partition, {})
        ready = [
            (tags["tags"]["version"], tags["tags"]["group"], name)
            for name, tags in rows.items()
            if "of" not in tags
            and (name not in leases or leases[name].is_free(now, owner))
            and (name not in cleared or not self._cleared_keys(rows, partition, name))
            and all((key, column) in holders for column in later for key in tags["keys"])
        ]
        names = [name for _, _, name in heapq.nsmallest(max_groups, ready)]
        fence = next(self._fences)
        if names:
            self._claims[(partition, consumer, claim_id)] = fence
            while len(self._claims) > _REMEMBERED_CLAIMS:
                self._claims.popitem(last=False)
        expires = now + self._lease_s
        for name in names:
            leases[name] = _RowLease(rows[name]["put"], fence, owner, expires)
        passed_over = dict(itertools.islice(self._passed_over(partition).items(), _NAMED_ROWS))
        return {"fence": fence, "rows": {name: rows[name] for name in names}, "passed_over": passed_over}

    def _later_columns(self, rows: Rows, partition: str, columns: Sequence[str]) -> list[str]:
        """Return those of `columns` that come after the put; DataPlaneError if one is not declared."""
        spec = self.spec(rows, partition)
        later = [column for column in columns if column not in spec["columns"]]
        unknown = sorted(set(later).difference(spec["later"]))
        if unknown:
            raise DataPlaneError(
                f"partition {partition!r} declares no column {', '.join(map(repr, unknown))}, so no group would ever "
                f"be ready; a put brings {list(spec['columns'])}, and later come {list(spec['later'])}"
            )
        return later

    def give_back(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        for name in self.leased(rows, partition, consumer, fences):
            del self._leases[(partition, consumer)][name]

    def renew(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        self._check_leased(rows, partition, consumer, fences)
        for name in self.leased(rows, partition, consumer, fences):
            self._leases[(partition, consumer)][name].expires = self._clock() + self._lease_s

    def leased(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> list[str]:
        leases = self._live_leases(rows, partition, consumer)
        return [name for name, fence in fences.items() if name in leases and leases[name].fence == fence]

    def reap(self, rows: Rows, partition: str, owners: Sequence[str]) -> list[str]:
        self.spec(rows, partition)
        for owner in owners:
            self._dead[(partition, owner)] = None
        while len(self._dead) > _REMEMBERED_DEAD:
            self._dead.popitem(last=False)
        freed = []
        for (where, consumer), _ in list(self._leases.items()):
            if where != partition:
                continue
            leases = self._live_leases(rows, partition, consumer)
            for name in [name for name, lease in leases.items() if lease.owner in owners]:
                del leases[name]
                freed.append(name)
        return freed

    def standing(self, rows: Rows, partition: str, keys: Sequence[str]) -> dict[str, str]:
        """Return the rows of keys, and which put of each; MissingRows if a key is missing."""
        self.spec(rows, partition)
        # Each row is looked up once, because a read asks for hundreds of keys.
        there: dict[str, set[str]] = {}
        standing: dict[str, str] = {}
        gone = []
        for key in keys:
            row = key.rpartition("_")[0]
            if row not in there:
                tags = rows.get(row)
                there[row] = set(tags["keys"]) - self._cleared_keys(rows, partition, row) if tags else set()
                standing[row] = tags["put"] if tags else ""
            if key not in there[row]:
                gone.append(key)
        if gone:
            raise MissingRows(f"{len(gone)} of {len(keys)} keys are not in {partition!r}: {gone[:5]}")
        return standing

    def locate(self, rows: Rows, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
        """Return the rows to fetch, and which put of each, so that every column of every key is there.

        MissingRows if one is not.
        """
        brought = set(self.spec(rows, partition)["columns"])
        standing = self.standing(rows, partition, keys)
        later = [column for column in columns if column not in brought]
        found = set(standing) if len(later) < len(columns) else set()
        holders = _holders(rows, later) if later else {}
        for key in keys:
            for column in later:
                if (key, column) not in holders:
                    raise MissingRows(
                        f"{key} has no column {column!r} in {partition!r}; a put brings {sorted(brought)}"
                    )
                found.add(holders[(key, column)])
        return {name: rows[name]["put"] for name in sorted(found)}

    def clear(
        self,
        rows: Rows,
        partition: str,
        keys: Sequence[str],
        consumer: str = "",
        fences: Mapping[str, int] | None = None,
    ) -> dict[str, str]:
        """Note keys as cleared; return rows, and which put of each, for the caller to delete in the store.

        A row goes with its last key. Keys that no row has are passed over: a second clear is a first one
        that finds nothing.
        """
        self.spec(rows, partition)
        by_row: dict[str, set[str]] = {}
        for key in keys:
            row = row_of(key) if is_sample_key(key) else ""
            if row in rows and key in rows[row]["keys"]:
                by_row.setdefault(row, set()).add(key)
        if fences is not None:
            self._check_leased(rows, partition, consumer, {row: fences.get(row, 0) for row in by_row})
        cleared = self._cleared.setdefault(partition, {})
        for row, gone in by_row.items():
            cleared[row] = (rows[row]["put"], gone | self._cleared_keys(rows, partition, row))
        return self.leftovers(rows, partition)

    def leftovers(self, rows: Rows, partition: str) -> dict[str, str]:
        """Return rows without a key left, and later columns whose group is gone, for the caller to delete.

        Each is given to one caller: the store deletes by a place that it then uses again, so that a second
        deletion could take a stranger's row. What is still there after a lease's time is given to another.
        """
        self.spec(rows, partition)
        cleared = self._cleared.setdefault(partition, {})
        for row in [row for row in cleared if row not in rows]:
            del cleared[row]
        later = [name for name, tags in rows.items() if "of" in tags]
        left = {name: rows[name]["put"] for name in (*cleared, *later) if self._is_leftover(rows, partition, name)}
        now = self._clock()
        given_before = self._deleting.get(partition, {})
        deleting = {put: given_before.get(put, -math.inf) for put in left.values()}
        given = {name: put for name, put in left.items() if deleting[put] < now}
        self._deleting[partition] = deleting | dict.fromkeys(given.values(), now + self._lease_s)
        return given

    def _is_leftover(self, rows: Rows, partition: str, name: str) -> bool:
        tags = rows[name]
        if "of" not in tags:
            return self._cleared_keys(rows, partition, name).issuperset(tags["keys"])
        return _is_lost(rows, tags) or self._is_leftover(rows, partition, tags["of"])

    def consumption(self, rows: Rows, partition: str, consumer: str) -> dict[str, int]:
        """Count the groups that are whole and free, and those under a claim."""
        self._check_consumer(rows, partition, consumer)
        now = self._clock()
        leases = {
            name: lease
            for name, lease in self._live_leases(rows, partition, consumer).items()
            if not lease.is_free(now)
        }
        ready = sum(
            "of" not in tags and name not in leases and not self._cleared_keys(rows, partition, name)
            for name, tags in rows.items()
        )
        claimed = sum(not self._cleared_keys(rows, partition, name).issuperset(rows[name]["keys"]) for name in leases)
        return {"ready": ready, "claimed": claimed, "passed_over": len(self._passed_over(partition))}

    def groups(self, rows: Rows, partition: str) -> list[Mapping[str, Any]]:
        self.spec(rows, partition)
        return [rows[name] for name in rows if "of" not in rows[name] and not self._cleared_keys(rows, partition, name)]

    def keys(self, rows: Rows, partition: str) -> list[str]:
        self.spec(rows, partition)
        return [
            key
            for name, tags in rows.items()
            if "of" not in tags
            for key in tags["keys"]
            if key not in self._cleared_keys(rows, partition, name)
        ]

    def _cleared_keys(self, rows: Rows, partition: str, name: str) -> frozenset[str] | set[str]:
        """Return the cleared keys of the row that the store has now under `name`."""
        put, keys = self._cleared.get(partition, {}).get(name, ("", frozenset()))
        return keys if put == rows[name]["put"] else frozenset()

    def _check_consumer(self, rows: Rows, partition: str, consumer: str) -> None:
        spec = self.spec(rows, partition)
        if consumer not in spec["consumers"]:
            raise DataPlaneError(
                f"{consumer!r} is not a consumer of {partition!r}; its consumers are {spec['consumers']}"
            )

    def _check_leased(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        held = set(self.leased(rows, partition, consumer, fences))
        lost = [name for name in fences if name in rows and name not in held]
        if lost:
            raise ClaimLost(
                f"{len(lost)} of {len(fences)} claimed groups are no longer held by {consumer!r}: {lost[:5]}; "
                "another claimer has them, or they were given back; nothing was done"
            )

    def _live_leases(self, rows: Rows, partition: str, consumer: str) -> dict[str, _RowLease]:
        """Return the leases after dropping those of deleted rows. One that expired stands until another is given."""
        self.spec(rows, partition)
        leases = self._leases.setdefault((partition, consumer), {})
        for name in [name for name, lease in leases.items() if name not in rows or rows[name]["put"] != lease.put]:
            del leases[name]
        return leases
