"""The data plane's one boundary; nobody else imports a backend.

A plane holds partitions of groups. One row holds one group; keys stay per sample in every
operation. Only metadata and tags pass through the driver; tensors go from collector to rank.

Invariants: two claimers never share a group; a group is claimed, given back and cleared whole
or key by key but never split between claimers; a read answers everything asked or raises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import check_tags
from asyncrl.engine.records.keys import is_sample_key, row_of

# One column of a group: a tensor a sample (one dtype, any shapes), or a plain object a sample.
Column = Sequence[torch.Tensor] | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Partition:
    """What a partition holds: `columns` come with every put; `consumers` may claim from it.

    Columns hold a tensor a sample, but for those named in `objects`, which hold plain objects. `later` names
    columns that are written after the put; a claim may wait for those, and for no others.
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
            raise DataPlaneError(f"partition {self.name!r} says objects of {unknown}; its columns are {self.columns}")
        for column in self.later:
            self.check_write(column)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The columns of tensors, in the order of `columns`."""
        return tuple(name for name in self.columns if name not in self.objects)

    def check_put(self, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        """Refuse a put of the wrong size, keys, columns, kinds or tags: DataPlaneError, TypeError or TagError."""
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
        """Refuse a later column that every put brings already."""
        if column in self.columns:
            raise DataPlaneError(f"column {column!r} of partition {self.name!r} comes with the put; it is no later one")


def check_group(group: GroupMeta) -> None:
    """Refuse keys of another group or twice, and tags that no log could write or claims could not be ordered by."""
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
    """Rows of the partition that another writer put, and why they were not taken; at most a few are named."""

    @property
    def lease(self) -> Lease:
        return Lease(self.partition, self.consumer, {group.row: self.fence for group in self.groups})


@dataclass(frozen=True, slots=True)
class Consumption:
    """Groups of a partition as one consumer sees them."""

    ready: int
    claimed: int
    passed_over: int = 0
    """Rows that another writer put, or another version of asyncrl: nobody is given those."""


class DataPlane(Protocol):
    """A client of the store; every call has a deadline of its own."""

    async def register(self, partition: Partition) -> None:
        """Create a partition, or check that the existing one is equal."""

    async def partition(self, name: str) -> Partition:
        """Return what a partition was registered as, by whichever client; DataPlaneError if it was not."""

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        """Write a whole group at once; on an error or cancellation nothing of it remains.

        Raises StoreFull, TagError, TypeError (a column of another kind than declared, or of mixed dtypes).
        """

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        """Take up to `max_groups` ready groups, oldest version first and then in dispatch order.

        A group is ready when all `columns` exist for it. Never waits: the claim may be empty. DataPlaneError for
        a column that the partition does not declare, since no group would ever be ready.
        The same `claim_id` again returns what it still holds, so a lost answer loses no group.
        ClaimLost if the owner was declared dead: names of owners are used once.
        """

    async def give_back(self, lease: Lease) -> None:
        """Make leased rows ready again; ones no longer leased are ignored."""

    async def renew(self, lease: Lease) -> None:
        """Push the expiry of leased rows out; ClaimLost if another holds any of them."""

    async def leased(self, lease: Lease) -> frozenset[str]:
        """Return the rows that are still leased under their fencing numbers."""

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        """Declare owners dead: what they had claimed is ready again, and they claim no more; return the rows."""

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        """Return, per column, one value a key in the order of `keys`; MissingRows names what is not there."""

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        """Add a later column for some keys; one writer a (column, key)."""

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        """Remove keys; idempotent, by key only. ClaimLost, and nothing cleared, if `lease` was lost."""

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        """Count ready and claimed groups."""

    async def groups(self, partition: str) -> list[GroupMeta]:
        """List the groups of which no key is cleared, claimed or not (cost grows with the partition)."""

    async def keys(self, partition: str) -> list[str]:
        """List the keys that are not cleared (for endings and tests; cost grows with the partition)."""

    async def watch(self) -> None:
        """Run until a process of the store dies, then raise DataPlaneDown; never returns otherwise."""

    async def close(self) -> None:
        """Release what this client holds; idempotent. The owner's close ends the store."""
