"""Where the bytes of a row are: in TransferQueue's storage, or in this host's shared memory.

Tags, claims and clears are TransferQueue's in both. A row counts as there once it has tags, and
gets them after its bytes. Rows are named with the `put` that made them, since names come again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import MissingRows, StoreFull

PAYLOAD = "payload"


class Payloads(Protocol):
    """`meta` is TransferQueue's handle on rows; `client` is an asynchronous TransferQueue client."""

    mapped: bool
    """Whether fetched buffers are aligned and the reader's own, so that views of them do."""

    async def store(self, client: Any, meta: Any, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> None:
        """Write one row's bytes, then its tags."""

    async def fetch(self, client: Any, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return, by row name, the bytes of `rows` (name to put); MissingRows if one is gone."""

    async def delete(self, client: Any, partition: str, rows: Mapping[str, str]) -> None:
        """Remove rows (name to put); those that are gone are passed over."""

    def close(self) -> None:
        """Release what this process owns."""


class InTransferQueue:
    """One jagged uint8 field a row."""

    mapped = False

    async def store(self, client: Any, meta: Any, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> None:
        meta.update_custom_meta([dict(tags)])
        nested = torch.nested.as_nested_tensor([torch.cat(list(parts))], layout=torch.jagged)
        try:
            await client.async_put(TensorDict({PAYLOAD: nested}, batch_size=1), meta)
        except RuntimeError as error:
            if "Storage capacity exceeded" in str(error):
                raise StoreFull(str(error)) from error
            raise

    async def fetch(self, client: Any, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        meta = await client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if meta.size != len(rows) or PAYLOAD not in meta.field_names:
            raise MissingRows(f"{len(rows) - meta.size} of {len(rows)} rows vanished from {partition!r}")
        data = await client.async_get_data(meta.select_fields([PAYLOAD]))
        buffers = list(data[PAYLOAD].unbind()) if PAYLOAD in data else []
        if len(buffers) != len(rows):
            raise MissingRows(f"asked {partition!r} for {len(rows)} rows and got {len(buffers)}")
        return dict(zip(rows, buffers, strict=True))

    async def delete(self, client: Any, partition: str, rows: Mapping[str, str]) -> None:
        meta = await client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if meta.size:
            await client.async_clear_samples(meta)

    def close(self) -> None:
        pass


class InSharedMemory:
    """One file a put; TransferQueue holds the tags alone."""

    mapped = True

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def store(self, client: Any, meta: Any, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> None:
        earlier = meta.custom_meta[0].get("put")
        self._memory.write(tags["put"], parts)
        meta.update_custom_meta([dict(tags)])
        await client.async_set_custom_meta(meta)
        if earlier is not None:
            self._memory.remove([earlier])

    async def fetch(self, client: Any, partition: str, rows: Mapping[str, str]) -> dict[str, torch.Tensor]:
        return {name: self._memory.map(put) for name, put in rows.items()}

    async def delete(self, client: Any, partition: str, rows: Mapping[str, str]) -> None:
        meta = await client.async_kv_retrieve_meta(keys=list(rows), partition_id=partition, create=False)
        if meta.size:
            # There is nothing of these rows in TransferQueue's storage to clear.
            await client._clear_meta_in_controller(meta)
        self._memory.remove(list(rows.values()))

    def close(self) -> None:
        self._memory.close()
