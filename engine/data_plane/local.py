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
from asyncrl.engine.data_plane.book import Book, PartitionBook
from asyncrl.engine.data_plane.codec import encode_row
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
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.errors import DataPlaneError, StoreFull
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.traffic import Traffic


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
        self._tags: dict[str, WatchedDict[str, Mapping[str, Any]]] = {}
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    async def register(self, partition: Partition) -> None:
        self._book.register(partition.name, asdict(partition))
        self._partitions[partition.name] = partition
        self._tags.setdefault(partition.name, WatchedDict())
        self._buffers.setdefault(partition.name, {})

    async def partition(self, name: str) -> Partition:
        return self._known(name)

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        self._known(partition).check_put(group, columns)
        await checkpoint()
        if group.row in self._tags[partition]:
            raise already_there(group.row, partition, self._tags[partition][group.row])
        self._check_room(group.row)
        self._buffers[partition][group.row] = encode_row(group.row, group.keys, columns)
        self._tags[partition][group.row] = group_row_tags(group.keys, columns, group.tags)
        return group

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        await checkpoint()
        asked: dict[str, Any] = {"columns": columns, "max_groups": max_groups, "owner": owner, "claim_id": claim_id}
        reply = self._of(partition).claim(consumer, **asked)
        return claim_of(reply, claim_id=claim_id, partition=partition, consumer=consumer, owner=owner)

    async def give_back(self, lease: Lease) -> None:
        self._of(lease.partition).give_back(lease.consumer, lease.fences)

    async def renew(self, lease: Lease) -> None:
        self._of(lease.partition).renew(lease.consumer, lease.fences)

    async def leased(self, lease: Lease) -> frozenset[str]:
        return frozenset(self._of(lease.partition).leased(lease.consumer, lease.fences))

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        return self._of(partition).reap(owners)

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        await checkpoint()
        names = self._of(partition).locate(keys, columns)
        return assemble(keys, columns, {name: self._buffers[partition][name] for name in names})

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        self._known(partition).check_write(column)
        await checkpoint()
        standing = self._of(partition).standing(list(values))
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
        for name in self._of(partition).clear(keys, *held):
            self._tags[partition].pop(name, None)
            self._buffers[partition].pop(name, None)

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        return Consumption(**self._of(partition).consumption(consumer))

    async def groups(self, partition: str) -> list[GroupMeta]:
        return [group_of(tags) for tags in self._of(partition).groups()]

    async def keys(self, partition: str) -> list[str]:
        return self._of(partition).keys()

    def traffic(self) -> Traffic:
        # Rows are in this process, and take no path.
        return Traffic()

    async def watch(self) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        self._partitions.clear()
        self._tags.clear()
        self._buffers.clear()

    def _of(self, partition: str) -> PartitionBook:
        self._known(partition)
        return self._book.of(partition, self._tags[partition])

    def _check_room(self, name: str) -> None:
        if self._capacity_rows is not None and sum(map(len, self._tags.values())) >= self._capacity_rows:
            raise StoreFull(f"the store holds its {self._capacity_rows} rows; {name} was not kept")

    def _known(self, partition: str) -> Partition:
        if partition not in self._partitions:
            raise DataPlaneError(f"partition {partition!r} is not registered; it knows {sorted(self._partitions)}")
        return self._partitions[partition]
