"""The operations of a plane through an asynchronous TransferQueue client, which tq.py comes by.

What it guards against, each measured: claims poll and never wait (a waiting claim freezes
TransferQueue's controller); every call has a deadline of its own (the library has none, and a
dead controller hangs its callers for ever); reads are checked (a missing key or column silently
shortens the answer); a slot is reused after a clear, so the payload names its row.

Bytes go through TransferQueue's storage or, on one host, through shared memory (payloads.py).
"""

import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeVar

import anyio
import torch

from asyncrl.engine import errors
from asyncrl.engine.data_plane.base import Claim, Column, Consumption, Lease, Partition
from asyncrl.engine.data_plane.codec import row_parts
from asyncrl.engine.data_plane.gathered import Gathered
from asyncrl.engine.data_plane.payloads import Payloads
from asyncrl.engine.data_plane.rows import (
    already_there,
    assemble,
    claim_of,
    column_row_tags,
    group_of,
    group_row_tags,
    split_by_row,
    stamped,
)
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError, DataPlaneSilent, MissingRows, StoreFull
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.traffic import Traffic

Result = TypeVar("Result")

# Every operation shares one task name: the book, not TransferQueue's bits, says what is claimed.
_TASK = "asyncrl"
# A field that no row has: TransferQueue need not go through all rows to find those that have it.
_NO_FIELD = "asyncrl-book"
_CLEANUP_S = 5.0


class ClientPlane:
    """All of a DataPlane but its start and end. `client` is TransferQueue's, `payloads` carry the bytes."""

    def __init__(self, client: Any, payloads: Payloads, *, deadline_s: float) -> None:
        self._client = client
        self._payloads = payloads
        self._deadline_s = deadline_s
        self._partitions: dict[str, Partition] = {}
        self._claims: dict[str, Gathered[Mapping[str, Any], Any]] = {}
        self._closed = False
        self._down = ""

    async def register(self, partition: Partition) -> None:
        # TransferQueue makes a partition with its first row: a row without data, gone at once.
        seed = f"register-{uuid.uuid4().hex}"
        await self._timed("register", self._client.async_kv_retrieve_meta([seed], partition.name, create=True))
        await self._timed("register", self._payloads.delete(partition.name, {seed: seed}))
        await self._control("register", partition.name, {"partition": partition.name, "spec": asdict(partition)})
        self._partitions[partition.name] = partition

    async def partition(self, name: str) -> Partition:
        if name not in self._partitions:
            spec = await self._control("spec", name, {"partition": name})
            if set(spec) != {field.name for field in fields(Partition)}:
                raise DataPlaneError(f"another version of asyncrl registered partition {name!r}, as {dict(spec)}")
            lists = {field: tuple(value) for field, value in spec.items() if isinstance(value, list | tuple)}
            self._partitions[name] = Partition(**{**spec, **lists})
        return self._partitions[name]

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        (await self.partition(partition)).check_put(group, columns)
        parts = row_parts(group.row, group.keys, columns)
        tags = group_row_tags(group.keys, columns, group.tags)
        node = await self._put_row("put", partition, parts, tags)
        return group if node is None else GroupMeta(group.keys, stamped(tags, node)["tags"])

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        asked = {"columns": list(columns), "max_groups": max_groups, "owner": owner, "claim_id": claim_id}
        # Claims at the same time share a call, which costs many times what one of them does.
        claims = self._claims.setdefault(partition, Gathered(partial(self._claim_all, partition)))
        reply = _result(await self._timed("claim", claims({"partition": partition, "consumer": consumer, **asked})))
        return claim_of(reply, claim_id=claim_id, partition=partition, consumer=consumer, owner=owner)

    async def give_back(self, lease: Lease) -> None:
        await self._control("give_back", lease.partition, _arguments(lease))

    async def renew(self, lease: Lease) -> None:
        await self._control("renew", lease.partition, _arguments(lease))

    async def leased(self, lease: Lease) -> frozenset[str]:
        return frozenset(await self._control("leased", lease.partition, _arguments(lease)))

    async def reap(self, partition: str, owners: Sequence[str]) -> list[str]:
        rows: list[str] = await self._control("reap", partition, {"partition": partition, "owners": list(owners)})
        return rows

    async def read(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, list[Any]]:
        if not keys:
            return {column: [] for column in columns}
        rows = await self._control(
            "locate", partition, {"partition": partition, "keys": list(keys), "columns": list(columns)}
        )
        if not rows:
            return {}
        buffers = await self._timed("read", self._payloads.fetch(partition, rows))
        return assemble(keys, columns, buffers, copy=not self._payloads.mapped)

    async def write(self, partition: str, column: str, values: Mapping[str, Any], *, writer: str) -> None:
        (await self.partition(partition)).check_write(column)
        there = {"partition": partition, "keys": list(values)}
        standing: dict[str, str] = await self._control("standing", partition, there)
        for row, by_key in split_by_row(values).items():
            tags = column_row_tags(row, standing[row], column, writer, list(by_key))
            parts = row_parts(tags["row"], list(by_key), {column: list(by_key.values())})
            await self._put_row("write", partition, parts, tags)
        try:
            await self._control("standing", partition, there)
        except MissingRows:
            # Of a group cleared meanwhile: whoever clears next would find it, and that may be nobody.
            await self._delete(partition, await self._control("leftovers", partition, {"partition": partition}))
            raise

    async def clear(self, partition: str, keys: Sequence[str], *, lease: Lease | None = None) -> None:
        if not keys:
            return
        arguments = _arguments(lease) if lease else {"partition": partition}
        gone = await self._control("clear", partition, {**arguments, "keys": list(keys)})
        await self._delete(partition, gone)

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        counts = await self._control("consumption", partition, {"partition": partition, "consumer": consumer})
        return Consumption(**counts)

    async def groups(self, partition: str) -> list[GroupMeta]:
        return [group_of(tags) for tags in await self._control("groups", partition, {"partition": partition})]

    async def keys(self, partition: str) -> list[str]:
        keys: list[str] = await self._control("keys", partition, {"partition": partition})
        return keys

    def traffic(self) -> Traffic:
        return self._payloads.meter.read()

    async def _control(self, op: str, partition: str, arguments: dict[str, Any]) -> Any:
        """Run one operation of the book inside TransferQueue's controller."""
        meta = await self._timed(
            op,
            self._client.async_get_meta(
                data_fields=[_NO_FIELD],
                batch_size=1,
                partition_id=partition,
                task_name=_TASK,
                sampling_config={"op": op, "arguments": arguments},
            ),
        )
        return _result(meta.custom_meta[0]["reply"])

    async def _claim_all(self, partition: str, claims: Sequence[Mapping[str, Any]]) -> list[Any]:
        replies: list[Any] = await self._control(
            "each", partition, {"calls": [["claim", dict(asked)] for asked in claims]}
        )
        return replies

    async def _delete(self, partition: str, rows: Mapping[str, str]) -> None:
        if rows:
            await self._timed("clear", self._payloads.delete(partition, rows))

    async def _put_row(
        self, op: str, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]
    ) -> str | None:
        """Write one row, and return its node, if that is to be known; whatever stops it, no ghost of it stays behind.

        DataPlaneError, and the earlier row stays, if the store has a row of this name.
        """
        name = tags["row"]
        try:
            stored = await self._timed(op, self._payloads.put(partition, parts, tags))
        except BaseException as error:
            with anyio.move_on_after(_CLEANUP_S, shield=True), suppress(RuntimeError):
                await self._payloads.delete(partition, {name: tags["put"]})
            if isinstance(error, StoreFull):
                raise StoreFull(f"no room for {name}: {error}") from error
            raise
        if stored.earlier:
            raise already_there(name, partition, stored.earlier)
        return stored.node

    async def _timed(self, op: str, call: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            call.close()
            raise DataPlaneError(f"{op} on a closed plane")
        if self._down:
            call.close()
            raise DataPlaneDown(self._down)
        try:
            with anyio.fail_after(self._deadline_s):
                return await call
        except TimeoutError:
            raise DataPlaneSilent(f"TransferQueue did not answer {op} within {self._deadline_s:g} s") from None
        except KeyError as error:
            raise MissingRows(f"rows were deleted during {op}: {error}") from error
        except RuntimeError as error:
            if isinstance(error, errors.AsyncRLError):
                raise
            raise DataPlaneError(f"TransferQueue refused {op}: {error}") from error


def _result(reply: Any) -> Any:
    """Return what an operation of the book answered, or raise what it raised."""
    if isinstance(reply, dict) and "error" in reply:
        raise getattr(errors, reply["error"])(reply["message"])
    return reply


def _arguments(lease: Lease) -> dict[str, Any]:
    return {
        "partition": lease.partition,
        "consumer": lease.consumer,
        "fences": dict(lease.fences),
    }
