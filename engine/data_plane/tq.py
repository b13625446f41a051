"""The plane on TransferQueue 0.1.11; this file and sampler.py are all that import it.

What it guards against, each measured: claims poll and never wait (a waiting claim freezes
TransferQueue's controller); every call has a deadline of its own (the library has none, and a
dead controller hangs its callers for ever); reads are checked (a missing key or column silently
shortens the answer); a slot is reused after a clear, so the payload names its row; only the
owner may close (an attached process would kill the shared controller); its actors ask for no
CPU (with too few, starting hangs silently).

Bytes go through TransferQueue's storage or, on one host, through shared memory (payloads.py).

TransferQueue unpickles what it receives, so it is for trusted networks; on one node
everything binds to loopback (see lifecycle/environment.py).
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import torch

from asyncrl.engine import errors
from asyncrl.engine.data_plane.base import Claim, Column, Consumption, Holding, Partition
from asyncrl.engine.data_plane.book import column_row_tags, group_row_tags
from asyncrl.engine.data_plane.codec import row_parts
from asyncrl.engine.data_plane.local import already_there, assemble, claim_of, group_of, split_by_row
from asyncrl.engine.data_plane.payloads import PAYLOAD, InSharedMemory, InTransferQueue, Payloads
from asyncrl.engine.data_plane.sampler import BookSampler
from asyncrl.engine.data_plane.shared_memory import SharedMemory
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError, MissingRows, Overdue, StoreFull
from asyncrl.engine.records import GroupMeta

Result = TypeVar("Result")

# Every operation shares one task name: the book, not TransferQueue's bits, says what is claimed.
_TASK = "asyncrl"
_PING_EVERY_S = 1.0
_CLEANUP_S = 5.0
_DOWN_CLOSE_S = 1.0


class TransferQueuePlane:
    """A DataPlane client on a running TransferQueue. Build it with `start`, `attach` or `in_process`."""

    def __init__(
        self,
        client: Any,
        *,
        deadline_s: float,
        closer: Callable[[], None],
        memory: SharedMemory | None = None,
        pings: Sequence[Callable[[], Awaitable[Any]]] = (),
    ) -> None:
        self._client = client
        self._payloads: Payloads = InTransferQueue(client) if memory is None else InSharedMemory(client, memory)
        self._deadline_s = deadline_s
        self._closer = closer
        self._pings = pings
        self._partitions: dict[str, Partition] = {}
        self._closed = False
        self._down = ""

    @classmethod
    async def start(
        cls,
        *,
        storage_units: int,
        deadline_s: float,
        start_s: float,
        capacity_rows: int | None = None,
        lease_s: float = 600.0,
        shared_memory: Path | None = None,
    ) -> "TransferQueuePlane":
        """Start TransferQueue on the Ray cluster this process is in, and own it.

        With `shared_memory`, a directory that all processes of this host see, payloads go there.
        """
        memory = None if shared_memory is None else SharedMemory.create(shared_memory, capacity_rows)
        config = {
            # Read by `attach`.
            "asyncrl": {"memory": memory and str(memory.path), "capacity_rows": capacity_rows},
            "controller": {"polling_mode": True, "sampler": BookSampler(lease_s)},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {
                    "num_data_storage_units": storage_units,
                    "total_storage_size": capacity_rows,
                },
            },
            "metrics": {"enabled": False},
        }
        try:
            with anyio.fail_after(start_s):
                await anyio.to_thread.run_sync(partial(_start_on_ray, config), abandon_on_cancel=True)
        except BaseException as error:
            if memory is not None:
                memory.close()
            if isinstance(error, TimeoutError):
                raise Overdue(f"TransferQueue did not start within {start_s:g} s") from None
            raise
        import transfer_queue
        from transfer_queue import interface

        units = list((interface._TQ_STORAGE or {}).get("SimpleStorage", {}).values())
        pings = [
            interface._TQ_CONTROLLER.get_zmq_server_info.remote,
            *(unit.get_zmq_server_info.remote for unit in units),
        ]
        return cls(
            transfer_queue.get_client(),
            deadline_s=deadline_s,
            closer=transfer_queue.close,
            memory=memory,
            pings=pings,
        )

    @classmethod
    async def attach(cls, *, deadline_s: float, start_s: float) -> "TransferQueuePlane":
        """Attach to the TransferQueue of this Ray cluster; closing leaves it running, and none is ever started."""
        import transfer_queue
        from transfer_queue import interface

        try:
            with anyio.fail_after(start_s):
                found = await anyio.to_thread.run_sync(interface._init_from_existing, abandon_on_cancel=True)
                if not found:
                    raise DataPlaneError("no TransferQueue runs on this Ray cluster; its owner has to start it first")
                options = (await interface._TQ_CONTROLLER.get_config.remote())["asyncrl"]
        except TimeoutError:
            raise Overdue(f"no TransferQueue to attach to within {start_s:g} s") from None
        client = transfer_queue.get_client()
        memory = None
        if options["memory"] is not None:
            memory = SharedMemory.open(Path(options["memory"]), options["capacity_rows"])
        return cls(client, deadline_s=deadline_s, closer=client.close, memory=memory)

    @classmethod
    def in_process(
        cls,
        *,
        deadline_s: float = 10.0,
        capacity_rows: int | None = None,
        lease_s: float = 600.0,
        shared_memory: Path | None = None,
    ) -> "TransferQueuePlane":
        """Run TransferQueue's own controller and storage in this process over loopback, without Ray."""
        import ray.util
        from transfer_queue.client import TransferQueueClient
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.storage.simple_storage import SimpleStorageUnit

        ray.util.get_node_ip_address = lambda *_, **__: "127.0.0.1"
        controller = TransferQueueController.__ray_metadata__.modified_class(
            polling_mode=True, sampler=BookSampler(lease_s)
        )
        unit = SimpleStorageUnit.__ray_metadata__.modified_class(
            config={"num_data_storage_units": 1, "total_storage_size": capacity_rows}
        )
        client = TransferQueueClient(f"asyncrl-{uuid.uuid4().hex[:8]}", controller.get_zmq_server_info())
        client.initialize_storage_manager(
            "SimpleStorage", {"zmq_info": {unit.storage_unit_id: unit.get_zmq_server_info()}}
        )

        def closer() -> None:
            client.close()
            unit.shutdown()

        memory = None if shared_memory is None else SharedMemory.create(shared_memory, capacity_rows)
        return cls(client, deadline_s=deadline_s, closer=closer, memory=memory)

    async def register(self, partition: Partition) -> None:
        # TransferQueue makes a partition with its first row: a row without data, gone at once.
        seed = f"register-{uuid.uuid4().hex}"
        await self._timed("register", self._client.async_kv_retrieve_meta([seed], partition.name, create=True))
        await self._timed("register", self._payloads.delete(partition.name, {seed: seed}))
        spec = {
            "size": partition.group_size,
            "columns": partition.columns,
            "consumers": partition.consumers,
        }
        await self._control("register", partition.name, {"partition": partition.name, "spec": spec})
        self._partitions[partition.name] = partition

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> None:
        (await self._known(partition)).check_put(group, columns)
        parts = row_parts(group.row, group.keys, columns)
        await self._put_row("put", partition, parts, group_row_tags(group.keys, columns, group.tags))

    async def claim(
        self,
        partition: str,
        consumer: str,
        *,
        columns: Sequence[str],
        max_groups: int,
        owner: str,
        claim_id: str,
    ) -> Claim:
        reply = await self._control(
            "claim",
            partition,
            {
                "partition": partition,
                "consumer": consumer,
                "columns": list(columns),
                "max_groups": max_groups,
                "owner": owner,
                "claim_id": claim_id,
            },
        )
        return claim_of(reply, claim_id=claim_id, partition=partition, consumer=consumer, owner=owner)

    async def give_back(self, holding: Holding) -> None:
        await self._control("give_back", holding.partition, _arguments(holding))

    async def renew(self, holding: Holding) -> None:
        await self._control("renew", holding.partition, _arguments(holding))

    async def held(self, holding: Holding) -> frozenset[str]:
        return frozenset(await self._control("held", holding.partition, _arguments(holding)))

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
        (await self._known(partition)).check_write(column)
        there = {"partition": partition, "keys": list(values), "columns": []}
        await self._control("locate", partition, there)
        rows: dict[str, str] = {}
        for row, by_key in split_by_row(values).items():
            tags = column_row_tags(row, column, writer, list(by_key))
            parts = row_parts(tags["row"], list(by_key), {column: list(by_key.values())})
            await self._put_row("write", partition, parts, tags)
            rows[tags["row"]] = tags["put"]
        try:
            # A group cleared meanwhile would leave its new column behind for ever.
            await self._control("locate", partition, there)
        except MissingRows:
            await self._timed("write", self._payloads.delete(partition, rows))
            raise

    async def clear(self, partition: str, keys: Sequence[str], *, holding: Holding | None = None) -> None:
        if not keys:
            return
        arguments = _arguments(holding) if holding else {"partition": partition}
        gone = await self._control("clear", partition, {**arguments, "keys": list(keys)})
        if gone:
            await self._timed("clear", self._payloads.delete(partition, gone))

    async def consumption(self, partition: str, consumer: str) -> Consumption:
        counts = await self._control("consumption", partition, {"partition": partition, "consumer": consumer})
        return Consumption(**counts)

    async def groups(self, partition: str) -> list[GroupMeta]:
        return [group_of(tags) for tags in await self._control("groups", partition, {"partition": partition})]

    async def keys(self, partition: str) -> list[str]:
        keys: list[str] = await self._control("keys", partition, {"partition": partition})
        return keys

    async def watch(self) -> None:
        if not self._pings:
            await anyio.sleep_forever()
        while True:
            await anyio.sleep(_PING_EVERY_S)
            for ping in self._pings:
                try:
                    with anyio.fail_after(self._deadline_s):
                        await ping()
                except TimeoutError:
                    self._down = f"TransferQueue has not answered for {self._deadline_s:g} s"
                    raise DataPlaneDown(self._down) from None
                except _ray_errors() as error:
                    self._down = f"a process of TransferQueue died: {error}"
                    raise DataPlaneDown(self._down) from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # An orderly end waits for processes that are gone; the cluster's own end takes the rest.
        limit = _DOWN_CLOSE_S if self._down else self._deadline_s
        with anyio.move_on_after(limit, shield=True):
            await anyio.to_thread.run_sync(self._closer, abandon_on_cancel=True)
        self._payloads.close()

    async def _control(self, op: str, partition: str, arguments: dict[str, Any]) -> Any:
        """Run one operation of the book inside TransferQueue's controller."""
        meta = await self._timed(
            op,
            self._client.async_get_meta(
                data_fields=[PAYLOAD],
                batch_size=1,
                partition_id=partition,
                task_name=_TASK,
                sampling_config={"op": op, "arguments": arguments},
            ),
        )
        reply = meta.custom_meta[0]["reply"]
        if isinstance(reply, dict) and "error" in reply:
            raise getattr(errors, reply["error"])(reply["message"])
        return reply

    async def _known(self, partition: str) -> Partition:
        """Return a partition's shape, also one that another client registered."""
        if partition not in self._partitions:
            spec = await self._control("spec", partition, {"partition": partition})
            self._partitions[partition] = Partition(
                partition, spec["size"], tuple(spec["columns"]), tuple(spec["consumers"])
            )
        return self._partitions[partition]

    async def _put_row(self, op: str, partition: str, parts: Sequence[torch.Tensor], tags: Mapping[str, Any]) -> None:
        """Write one row; whatever stops it, no ghost of the row stays behind.

        DataPlaneError, and the earlier row stays, if the store has a row of this name.
        """
        name = tags["row"]
        try:
            earlier = await self._timed(op, self._payloads.put(partition, parts, tags))
        except BaseException as error:
            with anyio.move_on_after(_CLEANUP_S, shield=True), suppress(RuntimeError):
                await self._payloads.delete(partition, {name: tags["put"]})
            if isinstance(error, StoreFull):
                raise StoreFull(f"no room for {name}: {error}") from error
            raise
        if earlier:
            raise already_there(name, partition, earlier)

    async def _timed(self, op: str, call: Awaitable[Result]) -> Result:
        if self._closed:
            asyncio.ensure_future(call).cancel()
            raise DataPlaneError(f"{op} on a closed plane")
        if self._down:
            asyncio.ensure_future(call).cancel()
            raise DataPlaneDown(self._down)
        try:
            with anyio.fail_after(self._deadline_s):
                return await call
        except TimeoutError:
            raise Overdue(f"TransferQueue did not answer {op} within {self._deadline_s:g} s") from None
        except KeyError as error:
            raise MissingRows(f"rows were deleted during {op}: {error}") from error
        except RuntimeError as error:
            if isinstance(error, errors.AsyncRLError):
                raise
            raise DataPlaneError(f"TransferQueue refused {op}: {error}") from error


def _arguments(holding: Holding) -> dict[str, Any]:
    return {
        "partition": holding.partition,
        "consumer": holding.consumer,
        "fences": dict(holding.fences),
    }


def _ray_errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _start_on_ray(config: dict[str, Any]) -> None:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    with suppress(ValueError):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        raise DataPlaneError("a TransferQueue runs on this Ray cluster already; there can be one, and one owner")
    originals = {actor: actor.options for actor in (SimpleStorageUnit, TransferQueueController)}
    for actor, options in originals.items():
        actor.options = partial(_without_cpus, options)
    try:
        transfer_queue.init(OmegaConf.create(config, flags={"allow_objects": True}))
    finally:
        for actor, options in originals.items():
            actor.options = options


def _without_cpus(options: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return options(*args, **{**kwargs, "num_cpus": 0})
