"""Where the bytes of a row are: in TransferQueue's storage, in this host's shared memory, or in Mooncake's store.

Which of the first two, a run on several nodes chooses for each row (per_row.py). Tags, claims and clears are
TransferQueue's in all of them. A row counts as there once it has tags, and
gets them after its bytes. Rows are named with the `put` that made them, since names come again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from anyio import to_thread
from tensordict import TensorDict

from asyncrl.engine.data_plane.gathered import Gathered
from asyncrl.engine.data_plane.meter import Meter, sizes_of
from asyncrl.engine.data_plane.mooncake import MooncakeStore
from asyncrl.engine.data_plane.rows import SCHEMA, repeats, stamped
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import MissingRows, StoreFull
from asyncrl.engine.records.traffic import Path

PAYLOAD = "payload"
LOOPBACK = "127.0.0.1"


class Stored(NamedTuple):
    """What became of a put: the tags of an earlier row, which stays; and where the row is (rows.py: `stamped`)."""

    earlier: Mapping[str, Any]
    node: str | None = None


class Payloads(Protocol):
    """`rows` name rows with the puts that made them."""

    mapped: bool
    """Whether fetched buffers are aligned and the reader's own, so that views of them do."""
    meter: Meter

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Stored:
        """Write a row's bytes and then its tags."""

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the bytes of `rows` by name; MissingRows if one is gone."""

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        """Remove rows, also half put ones; those that are gone, or were put again, are ignored."""

    def close(self) -> None:
        """Release what this process owns."""


def of_these_puts(meta: Any, rows: Mapping[str, str]) -> Any:
    """Leave out of TransferQueue's metadata the rows that another put made; a half put row has no tags yet."""
    puts = {*rows.values(), "None"}
    return meta.select_samples([at for at, tags in enumerate(meta.custom_meta) if str(tags.get("put")) in puts])


class InTransferQueue:
    """One jagged uint8 field per row. `client` is an asynchronous TransferQueue client, on the node `here`.

    With `stamps` a group's tags say on which node its row is.
    """

    mapped = False

    def __init__(self, client: Any, here: str = LOOPBACK, *, stamps: bool = False) -> None:
        self._client = client
        self._here = here
        self._stamps = stamps
        self.meter = Meter()

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Stored:
        meta = await self._client.async_kv_retrieve_meta(keys=[tags["row"]], partition_id=partition, create=True)
        earlier: Mapping[str, Any] = meta.custom_meta[0]
        if earlier and not repeats(earlier, tags):
            return Stored(earlier)
        [node] = self._nodes(meta)
        meta.update_custom_meta([dict(stamped(tags, node) if self._stamps else tags)])
        nested = torch.nested.as_nested_tensor([torch.cat(list(parts))], layout=torch.jagged)
        try:
            with self.meter.putting(self._path(node), sum(part.nbytes for part in parts)):
                await self._client.async_put(TensorDict({PAYLOAD: nested}, batch_size=1), meta)
        except RuntimeError as error:
            if "Storage capacity exceeded" in str(error):
                raise StoreFull(str(error)) from error
            raise
        return Stored({}, node if self._stamps else None)

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        meta = await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if meta.size != len(rows):
            raise MissingRows(f"{len(rows) - meta.size} of {len(rows)} rows vanished from {partition!r}")
        names = list(rows)
        paths = [self._path(node) for node in self._nodes(meta)]
        found: dict[str, torch.Tensor] = {}
        for path in dict.fromkeys(paths):
            which = [at for at, one in enumerate(paths) if one == path]
            with self.meter.getting(path) as sizes:
                buffers = await self._get(meta if len(which) == len(paths) else meta.select_samples(which))
                came = dict(zip([names[at] for at in which], buffers, strict=True))
                sizes.update(sizes_of(came))
            found |= came
        return found

    async def _get(self, meta: Any) -> list[torch.Tensor]:
        if PAYLOAD not in meta.field_names:
            raise MissingRows(f"{meta.size} rows have no bytes in TransferQueue's storage")
        data = await self._client.async_get_data(meta.select_fields([PAYLOAD]))
        buffers = list(data[PAYLOAD].unbind()) if PAYLOAD in data else []
        if len(buffers) != meta.size:
            raise MissingRows(f"asked for {meta.size} rows and got {len(buffers)}")
        return buffers

    def _nodes(self, meta: Any) -> list[str]:
        """Return the node of each row: TransferQueue deals rows to its storage units by their numbers."""
        units = [str(unit.ip) for unit in self._client.storage_manager.storage_unit_infos.values()]
        return [units[number % len(units)] for number in meta.global_indexes]

    def _path(self, node: str) -> Path:
        return "store_near" if node == self._here else "store_far"

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        meta = of_these_puts(
            await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False), rows
        )
        if meta.size:
            await self._client.async_clear_samples(meta)

    def close(self) -> None:
        pass


class _Beside(ABC):
    """One object of another store per put. TransferQueue holds only the tags; puts at the same time share a call."""

    mapped = True
    path: Path

    def __init__(self, client: Any) -> None:
        self._client = client
        self.meter = Meter()
        self._tag: dict[str, Gathered[Mapping[str, Any], Mapping[str, Any]]] = {}

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Stored:
        with self.meter.putting(self.path, sum(part.nbytes for part in parts)):
            await self._write(tags["put"], parts)
        tag = self._tag.setdefault(partition, Gathered(partial(self._tag_rows, partition)))
        earlier = await tag(tags)
        if earlier and not repeats(earlier, tags):
            await self._remove([tags["put"]])
            return Stored(earlier)
        if earlier and earlier.get("schema") == SCHEMA:
            await self._remove([earlier["put"]])
        return Stored({})

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        with self.meter.getting(self.path) as sizes:
            found = await self._read(rows)
            sizes.update(sizes_of(found))
        return found

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        await self.settled(partition)
        meta = of_these_puts(
            await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False), rows
        )
        if meta.size:
            # Nothing of these rows is in TransferQueue's storage.
            await self._client._clear_meta_in_controller(meta)
        await self._remove(list(rows.values()))

    async def settled(self, partition: str) -> None:
        """Wait for tags on their way: a call could name a row again that is then removed."""
        if partition in self._tag:
            await self._tag[partition].settled()

    @abstractmethod
    async def _write(self, put: str, parts: Sequence[torch.Tensor]) -> None:
        """Write the bytes of a put."""

    @abstractmethod
    async def _read(self, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the bytes of `rows` by name; MissingRows if one is gone."""

    @abstractmethod
    async def _remove(self, puts: Sequence[str]) -> None:
        """Remove the bytes of puts; those that are gone are ignored."""

    async def _tag_rows(self, partition: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Give rows their tags; return, for each, the tags that its name had before."""
        first: dict[str, Mapping[str, Any]] = {}
        for tags in rows:
            first.setdefault(tags["row"], tags)
        meta = await self._client.async_kv_retrieve_meta(keys=list(first), partition_id=partition, create=True)
        before: dict[str, Mapping[str, Any]] = {}
        free: list[int] = []
        for at, ((name, tags), earlier) in enumerate(zip(first.items(), meta.custom_meta, strict=True)):
            # A call that is made again finds its own tags.
            before[name] = {} if earlier.get("put") == tags["put"] else earlier
            if not before[name] or repeats(before[name], tags):
                free.append(at)
        if free:
            tagged = meta.select_samples(free)
            by_place = list(first.values())
            tagged.update_custom_meta([dict(by_place[at]) for at in free])
            await self._client.async_set_custom_meta(tagged)
        again = [tags for tags in rows if first[tags["row"]] is not tags]
        later = iter(await self._tag_rows(partition, again) if again else [])
        return [before[tags["row"]] if first[tags["row"]] is tags else next(later) for tags in rows]


class InSharedMemory(_Beside):
    """One file per put."""

    path = "memory_near"

    def __init__(self, client: Any, memory: SharedMemory) -> None:
        super().__init__(client)
        self._memory = memory

    async def _read(self, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        return {name: self._memory.map(put) for name, put in rows.items()}

    def close(self) -> None:
        self._memory.close()

    async def _write(self, put: str, parts: Sequence[torch.Tensor]) -> None:
        self._memory.write(put, parts)

    async def _remove(self, puts: Sequence[str]) -> None:
        self._memory.remove(puts)


class InMooncake(_Beside):
    """One object per put. Its calls wait for the network, so threads make them, also those that are given up.

    It does not say where an object is, so all count as far.
    """

    path = "store_far"

    def __init__(self, client: Any, store: MooncakeStore) -> None:
        super().__init__(client)
        self._store = store

    async def _read(self, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        buffers = await to_thread.run_sync(self._store.read, list(rows.values()), abandon_on_cancel=True)
        return dict(zip(rows, buffers, strict=True))

    def close(self) -> None:
        self._store.close()

    async def _write(self, put: str, parts: Sequence[torch.Tensor]) -> None:
        await to_thread.run_sync(self._store.write, put, parts, abandon_on_cancel=True)

    async def _remove(self, puts: Sequence[str]) -> None:
        await to_thread.run_sync(self._store.remove, puts, abandon_on_cancel=True)
