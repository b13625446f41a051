"""Payloads of a run on several nodes: for each row, shared memory or TransferQueue's storage.

    put on a node with a shelf       the node's shared memory, while it has room   ─▶ mapped there, sent elsewhere
    put on any other node            TransferQueue's storage, by its number        ─▶ read by whoever needs it

A row's tags say on whose shelf it is, if it is on one. A reader on that node needs not even ask: it finds the file.

Invariant: a row is in one of the two, and cleared there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
import torch

from asyncrl.engine.data_plane.meter import sizes_of
from asyncrl.engine.data_plane.payloads import InSharedMemory, InTransferQueue, Stored, of_these_puts
from asyncrl.engine.data_plane.rows import stamped
from asyncrl.engine.data_plane.shelves import Shelves
from asyncrl.engine.errors import MissingRows, StoreFull

log = structlog.get_logger()

SHELF = "shelf"
"""The row's tag that names the node, by address, on whose shelf it is."""


class PerRow:
    """For a process on a node of several. `client` is an asynchronous TransferQueue client."""

    mapped = True

    def __init__(self, client: Any, shelves: Shelves) -> None:
        self._client = client
        self._shelves = shelves
        self._memory = shelves.memory()
        self._queue = InTransferQueue(client, shelves.here, stamps=True)
        self._near = None if self._memory is None else InSharedMemory(client, self._memory)
        self.meter = self._queue.meter
        if self._near is not None:
            self._near.meter = self.meter
        self._told = False

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Stored:
        if self._near is not None:
            here = self._shelves.here
            try:
                stored = await self._near.put(partition, parts, {**stamped(tags, here), SHELF: here})
                return stored._replace(node=here)
            except StoreFull as error:
                if not self._told:
                    log.warning("rows go through TransferQueue's storage instead of shared memory", why=str(error))
                    self._told = True
        return await self._queue.put(partition, parts, tags)

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        here = {name: put for name, put in rows.items() if self._memory is not None and self._memory.has(put)}
        found = await self._near.fetch(partition, here) if self._near is not None and here else {}
        names = [name for name in rows if name not in here]
        if names:
            meta = await self._client.async_kv_retrieve_meta(keys=names, partition_id=partition, create=False)
            if meta.size != len(names):
                raise MissingRows(f"{len(names) - meta.size} of {len(names)} rows vanished from {partition!r}")
            for node, at in _by_shelf(meta):
                found |= await self._from(node, partition, {names[i]: rows[names[i]] for i in at})
        return {name: found[name] for name in rows}

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        if self._near is not None:
            await self._near.settled(partition)
        meta = of_these_puts(
            await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False), rows
        )
        # Files first: without its tags nobody would know any more on which node a row has one.
        if self._memory is not None:
            self._memory.remove(list(rows.values()))
        for node, at in _by_shelf(meta):
            part = meta.select_samples(at)
            if node is None:
                await self._client.async_clear_samples(part)
                continue
            if node != self._shelves.here:
                await self._shelves.remove(node, [tags["put"] for tags in part.custom_meta])
            # Nothing of these rows is in TransferQueue's storage.
            await self._client._clear_meta_in_controller(part)

    def close(self) -> None:
        """Do nothing: directories are their shelves'."""

    async def _from(self, node: str | None, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Read rows that are not in the memory of this node: from a shelf, or without one from the queue."""
        if node is None:
            # By their own metadata: that of rows of both kinds has no field that is common to them. And copies, which
            # are aligned: TransferQueue's buffers may begin anywhere.
            return {name: buffer.clone() for name, buffer in (await self._queue.fetch(partition, rows)).items()}
        if node == self._shelves.here:
            raise MissingRows(f"{len(rows)} rows were cleared while they were read: {list(rows)[:5]}")
        with self.meter.getting("memory_far") as sizes:
            found = dict(zip(rows, await self._shelves.read(node, list(rows.values())), strict=True))
            sizes.update(sizes_of(found))
        return found


def _by_shelf(meta: Any) -> Iterator[tuple[str | None, list[int]]]:
    """Yield the shelves of rows, None for those on none, and which rows each has."""
    by_node: dict[str | None, list[int]] = {}
    for at, tags in enumerate(meta.custom_meta):
        by_node.setdefault(tags.get(SHELF), []).append(at)
    yield from by_node.items()
