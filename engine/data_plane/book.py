"""Who holds which group: claims with leases, cleared keys, later columns.

A pure state machine over the rows of a store, run by whoever has them in one thread: inside
TransferQueue's controller (sampler.py) or in this process (local.py).

Invariant: a row is ready for a consumer, or leased to exactly one claim of it, or gone.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.engine.errors import ClaimLost, DataPlaneError, MissingRows
from asyncrl.engine.records.keys import row_of

Rows = Mapping[str, Mapping[str, Any]]

_REMEMBERED_CLAIMS = 4096


def group_row_tags(keys: Sequence[str], columns: Iterable[str], tags: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tags of a group's row."""
    return {"keys": list(keys), "columns": sorted(columns), "tags": dict(tags)}


def column_row(row: str, column: str, writer: str) -> str:
    """Name the row in which `writer` adds a later column to a group."""
    return f"{row}#{column}#{writer}"


def column_row_tags(row: str, column: str, keys: Sequence[str]) -> dict[str, Any]:
    """Build the tags of a later column's row."""
    return {"of": row, "column": column, "keys": list(keys)}


@dataclass(slots=True)
class _Lease:
    claim_id: str
    fence: int
    owner: str
    expires: float


class Book:
    """Claims of every partition and consumer. `rows` in each call is what the store shows now."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 600.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._fences = itertools.count(1)
        self._leases: dict[tuple[str, str], dict[str, _Lease]] = {}
        self._claims: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._cleared: dict[str, dict[str, set[str]]] = {}
        self._partitions: dict[str, Mapping[str, Any]] = {}

    def register(self, partition: str, spec: Mapping[str, Any]) -> None:
        """Note a partition's shape; DataPlaneError if it exists with another."""
        known = self._partitions.setdefault(partition, dict(spec))
        if dict(known) != dict(spec):
            raise DataPlaneError(f"partition {partition!r} exists as {known}, not as {spec}")

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
        self._check_consumer(partition, consumer)
        leases = self._live_leases(rows, partition, consumer)
        known = self._claims.get((partition, consumer, claim_id))
        if known is not None:
            names = [name for name, lease in leases.items() if lease.fence == known]
            return {"fence": known, "rows": {name: rows[name] for name in names}}
        cleared = self._cleared.get(partition, {})
        extra = self._later_columns(rows, columns)
        ready = []
        for name in rows:
            tags = rows[name]
            if "of" in tags or name in leases or name in cleared:
                continue
            if all(
                column in tags["columns"] or extra.get((name, column), set()).issuperset(tags["keys"])
                for column in columns
            ):
                ready.append((tags["tags"]["version"], tags["tags"]["group"], name))
        ready.sort()
        names = [name for _, _, name in ready[:max_groups]]
        fence = next(self._fences)
        if names:
            self._claims[(partition, consumer, claim_id)] = fence
            while len(self._claims) > _REMEMBERED_CLAIMS:
                self._claims.popitem(last=False)
        expires = self._clock() + self._lease_s
        for name in names:
            leases[name] = _Lease(claim_id, fence, owner, expires)
        return {"fence": fence, "rows": {name: rows[name] for name in names}}

    def give_back(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        for name in self.held(rows, partition, consumer, fences):
            del self._leases[(partition, consumer)][name]

    def renew(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        self._check_held(rows, partition, consumer, fences)
        for name in self.held(rows, partition, consumer, fences):
            self._leases[(partition, consumer)][name].expires = self._clock() + self._lease_s

    def held(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> list[str]:
        leases = self._live_leases(rows, partition, consumer)
        return [name for name, fence in fences.items() if name in leases and leases[name].fence == fence]

    def reap(self, rows: Rows, partition: str, owners: Sequence[str]) -> list[str]:
        freed = []
        for (where, consumer), _ in list(self._leases.items()):
            if where != partition:
                continue
            leases = self._live_leases(rows, partition, consumer)
            for name in [name for name, lease in leases.items() if lease.owner in owners]:
                del leases[name]
                freed.append(name)
        return freed

    def locate(self, rows: Rows, partition: str, keys: Sequence[str], columns: Sequence[str]) -> list[str]:
        """Return the rows to fetch so that every column of every key is there; MissingRows if not."""
        cleared = self._cleared.get(partition, {})
        gone = [key for key in keys if row_of(key) not in rows or key in cleared.get(row_of(key), ())]
        if gone:
            raise MissingRows(f"{len(gone)} of {len(keys)} keys are not in {partition!r}: {gone[:5]}")
        fetch: dict[str, None] = {}
        later: dict[str, list[str]] = {}
        for key in keys:
            row = row_of(key)
            for column in columns:
                if column in rows[row]["columns"]:
                    fetch[row] = None
                    continue
                if row not in later:
                    later[row] = [name for name in rows if rows[name].get("of") == row]
                holder = next((n for n in later[row] if rows[n]["column"] == column and key in rows[n]["keys"]), None)
                if holder is None:
                    raise MissingRows(
                        f"{key} has no column {column!r} in {partition!r}; its group has {rows[row]['columns']}"
                    )
                fetch[holder] = None
        return list(fetch)

    def clear(
        self,
        rows: Rows,
        partition: str,
        keys: Sequence[str],
        consumer: str = "",
        fences: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Note keys as cleared; return the rows whose last key went, for the store to delete."""
        touched = {row_of(key): None for key in keys}
        if fences is not None:
            self._check_held(rows, partition, consumer, {row: fences.get(row, 0) for row in touched})
        cleared = self._cleared.setdefault(partition, {})
        for row in [row for row in cleared if row not in rows]:
            del cleared[row]
        for key in keys:
            if row_of(key) in rows:
                cleared.setdefault(row_of(key), set()).add(key)
        whole = [row for row in touched if row in rows and cleared[row].issuperset(rows[row]["keys"])]
        later = [name for name in rows if rows[name].get("of") in whole] if whole else []
        return whole + later

    def consumption(self, rows: Rows, partition: str, consumer: str) -> dict[str, int]:
        self._check_consumer(partition, consumer)
        leases = self._live_leases(rows, partition, consumer)
        cleared = self._cleared.get(partition, {})
        whole = [
            name
            for name in rows
            if "of" not in rows[name] and not cleared.get(name, set()).issuperset(rows[name]["keys"])
        ]
        return {"ready": sum(name not in leases for name in whole), "claimed": len(leases)}

    def keys(self, rows: Rows, partition: str) -> list[str]:
        cleared = self._cleared.get(partition, {})
        return [
            key
            for name in rows
            if "of" not in rows[name]
            for key in rows[name]["keys"]
            if key not in cleared.get(name, ())
        ]

    def _check_consumer(self, partition: str, consumer: str) -> None:
        spec = self._partitions.get(partition)
        if spec is None:
            raise DataPlaneError(f"partition {partition!r} is not registered; it knows {sorted(self._partitions)}")
        if consumer not in spec["consumers"]:
            raise DataPlaneError(f"{consumer!r} is no consumer of {partition!r}; they are {spec['consumers']}")

    def _check_held(self, rows: Rows, partition: str, consumer: str, fences: Mapping[str, int]) -> None:
        held = set(self.held(rows, partition, consumer, fences))
        lost = [name for name in fences if name in rows and name not in held]
        if lost:
            raise ClaimLost(
                f"{len(lost)} of {len(fences)} claimed groups are no longer held by {consumer!r}: {lost[:5]}; "
                "another claimer may have them, so nothing was done"
            )

    def _live_leases(self, rows: Rows, partition: str, consumer: str) -> dict[str, _Lease]:
        """Return the leases after dropping those of deleted rows and, the fallback, expired ones."""
        leases = self._leases.setdefault((partition, consumer), {})
        now = self._clock()
        for name in [name for name, lease in leases.items() if name not in rows or lease.expires < now]:
            del leases[name]
        return leases

    @staticmethod
    def _later_columns(rows: Rows, columns: Sequence[str]) -> dict[tuple[str, str], set[str]]:
        found: dict[tuple[str, str], set[str]] = {}
        for name in rows:
            tags = rows[name]
            if "of" in tags and tags["column"] in columns:
                found.setdefault((tags["of"], tags["column"]), set()).update(tags["keys"])
        return found
