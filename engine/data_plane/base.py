"""The one boundary to the data plane; only this package imports a backend.

A plane holds partitions of groups. One row holds one group; every operation takes keys per sample. Only metadata and
tags pass through the driver; tensors go from collector to rank.

Invariants: two claimers never share a group; a group is claimed, given back and cleared as a whole or key by key, and
never split between claimers; a read returns everything that was asked for, or raises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import check_tags
from asyncrl.engine.records.keys import is_sample_key, row_of
from asyncrl.engine.records.traffic import Traffic

# One column of a group: one tensor per sample (one dtype, any shapes), or one plain object per sample.
Column = Sequence[torch.Tensor] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Partition:
    """What a partition holds: `columns` come with every put; `consumers` may claim from it.

    Columns have one tensor per sample; those in `objects` have plain objects instead. `later` names columns that are
    written after the put; a claim can wait only for those.
    """

    name: str
    group_size: int
    columns: tuple[str, ...]
    consumers: tuple[str, ...]
    objects: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.objects) - set(self.columns))
        if unknown:
            raise DataPlaneError(f"partition {self.name!r} names {unknown} in objects; its columns are {self.columns}")
        for column in self.later:
            self.check_write(column)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The columns of tensors, in the order of `columns`."""
        return tuple(name for name in self.columns if name not in self.objects)

    def check_put(self, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        """DataPlaneError, TypeError or TagError if a put has the wrong size, keys, columns, kinds or tags."""
        if group.size != self.group_size:
            raise DataPlaneError(
                f"{group.row} has {group.size} samples; partition {self.name!r} takes {self.group_size}"
            )
        if set(columns) != set(self.columns):
            raise DataPlaneError(
                f"{group.row} brings columns {sorted(columns)}; partition {self.name!r} takes {sorted(self.columns)}"
            )
        for name, values in columns.items():
            if len(values) != group.size:
                raise DataPlaneError(f"{group.row}: column {name!r} has {len(values)} of {group.size} samples")
            self._check_kind(name, values, row=group.row)
        check_group(group)

    def _check_kind(self, column: str, values: Column, *, row: str) -> None:
        objects = column in self.objects
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) is objects:
                raise TypeError(
                    f"{row}: column {column!r} of partition {self.name!r} is declared to hold "
                    f"{'plain objects' if objects else 'tensors'}; sample {i} brings {type(value).__name__}"
                )

    def check_write(self, column: str) -> None:
        """DataPlaneError if every put already brings this later column."""
        if column in self.columns:
            raise DataPlaneError(
                f"column {column!r} of partition {self.name!r} comes with the put, so it cannot be a later one"
            )


def check_group(group: GroupMeta) -> None:
    """DataPlaneError if a key is of another group or occurs twice; TagError if a log could not write a tag."""
    for key in group.keys:
        if not is_sample_key(key) or row_of(key) != group.row or group.keys.count(key) != 1:
            raise DataPlaneError(f"{key!r} cannot be a key of {group.row}: keys are distinct, <row>_g<index>")
    check_tags(group.tags, key=group.row)
    _ = group.version, group.group


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows leased to a consumer, each with the fencing number under which it was claimed."""

    partition: str
    consumer: str
    fences: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """Groups that one owner holds for one consumer. `fence` grows with every claim."""

    id: str
    partition: str
    consumer: str
    owner: str
    fence: int
    groups: tuple[GroupMeta, ...]
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Rows of the partition that another writer put, and why they were passed over; at most a few are named."""

    @property
    def lease(self) -> Lease:
        return Lease(self.partition, self.consumer, {group.row: self.fence for group in self.groups})


@dataclass(frozen=True, slots=True)
class Consumption:
    """Groups of a partition as one consumer sees them."""

    ready: int
    claimed: int
    passed_over: int = 0
    """Rows that another writer, or another version of asyncrl, put; they are never handed out."""


class DataPlane(Protocol):
    """A client of the store; every call has a deadline of its own."""

    async def register(self, partition: Partition) -> None:
        """Create a partition, or check that the existing one is equal."""

    async def partition(self, name: str) -> Partition:
        """Return a partition as it was registered, by any client; DataPlaneError if it was not."""

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        """Write a whole group at once, and return it as it is there; after an error or a cancellation nothing remains.

        In a run on several nodes it gets the tag `stored_at`, unless it has one: where the row is, if that is known.
        Raises StoreFull, TagError, TypeError (a column of another kind than declared, or of mixed dtypes).
        """

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        """Take up to `max_groups` ready groups, oldest version first and then in dispatch order.

        A group is ready when all `columns` exist for it. Never waits: the claim may be empty. DataPlaneError
        if the partition does not declare a column, because no group would ever be ready. A second call with the same
        `claim_id` returns what that claim still holds, so a lost answer loses no group. ClaimLost if the owner was
        declared dead: the name of an owner is used once.
        """

    async def give_back(self, lease: Lease) -> None:
        """Make leased rows ready again; ones no longer leased are ignored."""

    async def renew(self, lease: Lease) -> None:
        """Extend the leases of rows; ClaimLost if another owner holds one of them."""

    async def leased(self, lease: Lease) -> frozenset[str]:
        """Return the rows that are still leased under their fencing numbers."""

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        """Declare owners dead: their rows are ready again, and they cannot claim any more. Return those rows."""

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        """Return, per column, one value per key in the order of `keys`; MissingRows if a key or column is missing."""

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        """Add a later column for some keys; each (column, key) has one writer."""

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        """Remove keys; idempotent. ClaimLost if `lease` was lost; then nothing is cleared."""

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        """Count ready and claimed groups."""

    async def groups(self, partition: str) -> list[GroupMeta]:
        """List the groups without a cleared key, claimed or not (the cost grows with the partition)."""

    async def keys(self, partition: str) -> list[str]:
        """List the keys that are not cleared (for endings and tests; the cost grows with the partition)."""

    def traffic(self) -> Traffic:
        """Return what this client has put and read so far, by path."""

    async def watch(self) -> None:
        """Wait until a process of the store dies, then raise DataPlaneDown; never returns."""

    async def close(self) -> None:
        """Release this client's resources; idempotent. The owner's close ends the store."""
