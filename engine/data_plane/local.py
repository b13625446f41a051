"""A plane in this process: no network, no thread, the same claims and the same bytes.

It serves `runtime: local`, virtual time and unit tests, and passes the contract suite.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anyio
import torch
from anyio.lowlevel import checkpoint

from asyncrl.engine.data_plane.base import Claim, Column, Consumption, Lease, Partition
from asyncrl.engine.data_plane.book import Book
from asyncrl.engine.data_plane.codec import encode_row
from asyncrl.engine.data_plane.own_rows import Rows
from asyncrl.engine.data_plane.rows import (
    already_there,
    assemble,
    claim_of,
    column_row,
    column_row_tags,
    group_of,
    group_row_tags,
    repeats,
    split_by_row,
)
from asyncrl.engine.errors import DataPlaneError, StoreFull
from asyncrl.engine.records import GroupMeta


class LocalPlane:
    """Rows in a dictionary. `capacity_rows` refuses puts beyond it, as a full store does."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        capacity_rows: int | None = None,
        lease_s: float = 600.0,
    ) -> None:
        self._book = Book(clock, lease_s)
        self._capacity_rows = capacity_rows
        self._partitions: dict[str, Partition] = {}
        self._tags: dict[str, dict[str, dict[str, Any]]] = {}
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    async def register(self, partition: Partition) -> None:
        self._book.register(partition.name, asdict(partition))
        self._partitions[partition.name] = partition
        self._tags.setdefault(partition.name, {})
        self._buffers.setdefault(partition.name, {})

    async def partition(self, name: str) -> Partition:
        return self._known(name)

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        self._known(partition).check_put(group, columns)
        await checkpoint()
        if group.row in self._tags[partition]:
            raise already_there(group.row, partition, self._tags[partition][group.row])
        self._check_room(group.row)
        self._buffers[partition][group.row] = encode_row(group.row, group.keys, columns)
        self._tags[partition][group.row] = group_row_tags(group.keys, columns, group.tags)

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        await checkpoint()
        asked: dict[str, Any] = {"columns": columns, "max_groups": max_groups, "owner": owner, "claim_id": claim_id}
        reply = self._book.claim(self._own(partition), partition=partition, consumer=consumer, **asked)
        return claim_of(reply, claim_id=claim_id, partition=partition, consumer=consumer, owner=owner)

    async def give_back(self, lease: Lease) -> None:
        self._book.give_back(self._own(lease.partition), lease.partition, lease.consumer, lease.fences)

    async def renew(self, lease: Lease) -> None:
        self._book.renew(self._own(lease.partition), lease.partition, lease.consumer, lease.fences)

    async def leased(self, lease: Lease) -> frozenset[str]:
        rows = self._own(lease.partition)
        return frozenset(self._book.leased(rows, lease.partition, lease.consumer, lease.fences))

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        return self._book.reap(self._own(partition), partition, owners)

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        await checkpoint()
        names = self._book.locate(self._own(partition), partition, keys, columns)
        return assemble(keys, columns, {name: self._buffers[partition][name] for name in names})

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        self._known(partition).check_write(column)
        await checkpoint()
        standing = self._book.standing(self._own(partition), partition, list(values))
        for row, by_key in split_by_row(values).items():
            name = column_row(row, column, writer)
            tags = column_row_tags(row, standing[row], column, writer, list(by_key))
            earlier = self._tags[partition].get(name)
            if earlier is not None and not repeats(earlier, tags):
                raise already_there(name, partition, earlier)
            self._check_room(name)
            self._buffers[partition][name] = encode_row(name, list(by_key), {column: list(by_key.values())})
            self._tags[partition][name] = tags

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        await checkpoint()
        held = (lease.consumer, lease.fences) if lease else ()
        for name in self._book.clear(self._own(partition), partition, keys, *held):
            self._tags[partition].pop(name, None)
            self._buffers[partition].pop(name, None)

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        return Consumption(**self._book.consumption(self._own(partition), partition, consumer))

    async def groups(self, partition: str) -> list[GroupMeta]:
        return [group_of(tags) for tags in self._book.groups(self._own(partition), partition)]

    async def keys(self, partition: str) -> list[str]:
        return self._book.keys(self._own(partition), partition)

    async def watch(self) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        self._partitions.clear()
        self._tags.clear()
        self._buffers.clear()

    def _own(self, partition: str) -> Rows:
        self._known(partition)
        return self._book.own(self._tags[partition], partition)

    def _check_room(self, name: str) -> None:
        if self._capacity_rows is not None and sum(map(len, self._tags.values())) >= self._capacity_rows:
            raise StoreFull(f"the store holds its {self._capacity_rows} rows; {name} was not kept")

    def _known(self, partition: str) -> Partition:
        if partition not in self._partitions:
            raise DataPlaneError(f"partition {partition!r} is not registered; it knows {sorted(self._partitions)}")
        return self._partitions[partition]
