"""Where the bytes of a row are: in TransferQueue's storage, or in this host's shared memory.

Tags, claims and clears are TransferQueue's in both. A row counts as there once it has tags, and
gets them after its bytes. Rows are named with the `put` that made them, since names come again.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from asyncrl.engine.data_plane.gathered import Gathered
from asyncrl.engine.data_plane.rows import SCHEMA, repeats
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import MissingRows, StoreFull

PAYLOAD = "payload"


class Payloads(Protocol):
    """`rows` name rows with the puts that made them."""

    mapped: bool
    """Whether fetched buffers are aligned and the reader's own, so that views of them do."""

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write a row's bytes and then its tags; return none, or those of an earlier row, which stays."""

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the bytes of `rows` by name; MissingRows if one is gone."""

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        """Remove rows, also half put ones; those that are gone, or were put again, are ignored."""

    def close(self) -> None:
        """Release what this process owns."""


def _of_these_puts(meta: Any, rows: Mapping[str, str]) -> Any:
    """Leave out of TransferQueue's metadata the rows that another put made; a half put row has no tags yet."""
    puts = {*rows.values(), "None"}
    return meta.select_samples([at for at, tags in enumerate(meta.custom_meta) if str(tags.get("put")) in puts])


class InTransferQueue:
    """One jagged uint8 field per row. `client` is an asynchronous TransferQueue client."""

    mapped = False

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Mapping[str, Any]:
        meta = await self._client.async_kv_retrieve_meta(keys=[tags["row"]], partition_id=partition, create=True)
        earlier: Mapping[str, Any] = meta.custom_meta[0]
        if earlier and not repeats(earlier, tags):
            return earlier
        meta.update_custom_meta([dict(tags)])
        nested = torch.nested.as_nested_tensor([torch.cat(list(parts))], layout=torch.jagged)
        try:
            await self._client.async_put(TensorDict({PAYLOAD: nested}, batch_size=1), meta)
        except RuntimeError as error:
            if "Storage capacity exceeded" in str(error):
                raise StoreFull(str(error)) from error
            raise
        return {}

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        meta = await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if meta.size != len(rows) or PAYLOAD not in meta.field_names:
            raise MissingRows(f"{len(rows) - meta.size} of {len(rows)} rows vanished from {partition!r}")
        data = await self._client.async_get_data(meta.select_fields([PAYLOAD]))
        buffers = list(data[PAYLOAD].unbind()) if PAYLOAD in data else []
        if len(buffers) != len(rows):
            raise MissingRows(f"asked {partition!r} for {len(rows)} rows and got {len(buffers)}")
        return dict(zip(rows, buffers, strict=True))

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        meta = _of_these_puts(
            await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False), rows
        )
        if meta.size:
            await self._client.async_clear_samples(meta)

    def close(self) -> None:
        pass


class InSharedMemory:
    """One file per put. TransferQueue holds only the tags; puts at the same time share a call."""

    mapped = True

    def __init__(self, client: Any, memory: SharedMemory) -> None:
        self._client = client
        self._memory = memory
        self._tag: dict[str, Gathered[Mapping[str, Any], Mapping[str, Any]]] = {}

    async def put(self, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> Mapping[str, Any]:
        self._memory.write(tags["put"], parts)
        tag = self._tag.setdefault(partition, Gathered(partial(self._tag_rows, partition)))
        earlier = await tag(tags)
        if earlier and not repeats(earlier, tags):
            self._memory.remove([tags["put"]])
            return earlier
        if earlier:
            self._memory.remove([earlier["put"]] if earlier.get("schema") == SCHEMA else [])
        return {}

    async def fetch(self, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        return {name: self._memory.map(put) for name, put in rows.items()}

    async def delete(self, partition: str, rows: Mapping[str, str]) -> None:
        if partition in self._tag:
            # A call under way could name a row again that is removed here.
            await self._tag[partition].settled()
        meta = _of_these_puts(
            await self._client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False), rows
        )
        if meta.size:
            # Nothing of these rows is in TransferQueue's storage.
            await self._client._clear_meta_in_controller(meta)
        self._memory.remove(list(rows.values()))

    def close(self) -> None:
        self._memory.close()

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
