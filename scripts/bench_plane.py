"""How fast groups move from a collector to a rank on one host, against raw per-sample TransferQueue, in one run.

4,096 samples of 1k tokens in groups of 8, four columns; a collector process puts, a rank process
gets, both attached to one TransferQueue on Ray. Ours: a row per group, bytes through shared memory
(`put_ratio`, `get_ratio`), through TransferQueue's storage (`storage_*`) or through Mooncake's store
(`mooncake_*`). Raw: a row per sample, the same four columns as jagged fields, one put per group; ours on Mooncake is
compared with raw on TransferQueue's own Mooncake backend, on the same storage processes. Both have `--in-flight` puts
under way and get `--groups-per-read` groups at a time.

A get returns one tensor per sample and column, and then every one of them is summed, so that each byte has
been in the reader's hands: `get_ratio`. `get_ratio_unread` is without the sums; a mapped page that nobody
reads costs next to nothing, so it says what a get costs and not what reading costs.

All kinds take turns; of each, a first round is not counted, and figures are medians of `--repeats` further
ones. Ratios are raw's seconds over ours, shares are of a plain copy of the same bytes. The last line is one
JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from asyncrl.engine.lifecycle.process_env import prepare

COLUMNS = ("tokens", "logprobs", "mask", "advantages")
SIZE = 8
# By backend: its kind, and the raw kind that it is compared with.
KINDS = {"simple": ("storage", "raw"), "shared_memory": ("shared", "raw"), "mooncake": ("mooncake", "raw_mooncake")}
RATIOS = {"shared": "", "storage": "storage_", "mooncake": "mooncake_"}
RAW_BUFFER_BYTES = 256 << 20


def columns_of(group: int, tokens: int) -> dict[str, list[Any]]:
    import torch

    lengths = [tokens - (group * SIZE + i) % 16 for i in range(SIZE)]
    return {
        "tokens": [torch.arange(n, dtype=torch.int32) for n in lengths],
        "logprobs": [torch.full((n,), -0.5) for n in lengths],
        "mask": [torch.ones(n, dtype=torch.uint8) for n in lengths],
        "advantages": [torch.zeros(n) for n in lengths],
    }


class Worker:
    """A collector or a rank: a process with a client of its own."""

    async def attach(self, groups: int, tokens: int, mooncake: Any) -> int:
        """Return the bytes of all groups. `mooncake` is where its store is, if it is measured."""
        if mooncake is not None:
            from asyncrl.engine.data_plane.mooncake import load

            load()  # TransferQueue looks for it only when it is imported.
        from asyncrl.engine.data_plane.payloads import InTransferQueue
        from asyncrl.engine.data_plane.tq import TransferQueuePlane
        from asyncrl.engine.records import GroupMeta
        from asyncrl.engine.records.keys import sample_keys

        self._plane = await TransferQueuePlane.attach(deadline_s=120, start_s=60)
        self._payloads = {"shared": self._plane._payloads, "storage": InTransferQueue(self._plane._client)}
        self._raw = {"raw": self._plane._client}
        if mooncake is not None:
            await self._attach_mooncake(mooncake)
        self._groups = [columns_of(i, tokens) for i in range(groups)]
        self._sums = [sums_of(columns) for columns in self._groups]
        self._reads = False
        self._metas = [
            GroupMeta(sample_keys(0, i, SIZE), {"group": i, "version": 0, "reward": [0.0] * SIZE})
            for i in range(groups)
        ]
        return sum(t.nbytes for columns in self._groups for rows in columns.values() for t in rows)

    async def _attach_mooncake(self, address: Any) -> None:
        from transfer_queue import interface
        from transfer_queue.client import TransferQueueClient

        from asyncrl.engine.data_plane.mooncake import MooncakeStore
        from asyncrl.engine.data_plane.mooncake_service import node_address
        from asyncrl.engine.data_plane.payloads import InMooncake

        store = MooncakeStore(address, node_address())
        self._payloads["mooncake"] = InMooncake(self._plane._client, store)
        info = await interface._TQ_CONTROLLER.get_zmq_server_info.remote()
        self._raw["raw_mooncake"] = TransferQueueClient(f"raw-{id(self)}", info)
        options = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": address.master,
            "local_hostname": node_address(),
            "protocol": address.protocol,
            "device_name": address.devices,
            "global_segment_size": 0,
            "local_buffer_size": RAW_BUFFER_BYTES,
        }
        self._raw["raw_mooncake"].initialize_storage_manager("MooncakeStore", options)

    async def put(self, kind: str, in_flight: int) -> float:
        """Put all groups; return seconds."""
        call = self._put_raw if kind in self._raw else self._put_ours
        if kind not in self._raw:
            self._plane._payloads = self._payloads[kind]
        return await _timed([(kind, i) for i in range(len(self._metas))], call, in_flight)

    async def get(self, kind: str, groups_per_read: int, reads: bool) -> float:
        """Get all groups, one call after the other, and sum every tensor if `reads`; return seconds."""
        self._reads = reads
        call = self._get_raw if kind in self._raw else self._get_ours
        if kind not in self._raw:
            self._plane._payloads = self._payloads[kind]
        chunks = [range(at, at + groups_per_read) for at in range(0, len(self._metas), groups_per_read)]
        return await _timed([(kind, chunk) for chunk in chunks], call, 1)

    async def clear(self, kind: str) -> None:
        if kind in self._raw:
            await self._raw[kind].async_clear_partition(kind)
        else:
            await self._plane.clear(kind, [key for meta in self._metas for key in meta.keys])

    async def _put_ours(self, kind: str, index: int) -> None:
        await self._plane.put(kind, self._metas[index], self._groups[index])

    async def _get_ours(self, kind: str, indexes: range) -> None:
        keys = [key for i in indexes for key in self._metas[i].keys]
        self._use(await self._plane.read(kind, keys, COLUMNS), indexes)

    async def _put_raw(self, kind: str, index: int) -> None:
        import torch
        from tensordict import TensorDict

        client = self._raw[kind]
        meta = await client.async_kv_retrieve_meta(keys=list(self._metas[index].keys), partition_id=kind, create=True)
        rows = self._groups[index].items()
        fields = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows}
        meta.update_custom_meta([{"reward": 0.0}] * SIZE)
        await client.async_put(TensorDict(fields, batch_size=SIZE), meta)

    async def _get_raw(self, kind: str, indexes: range) -> None:
        client = self._raw[kind]
        names = [key for i in indexes for key in self._metas[i].keys]
        meta = await client.async_kv_retrieve_meta(keys=names, partition_id=kind, create=False)
        data = await client.async_get_data(meta.select_fields(list(COLUMNS)))
        self._use({name: list(data[name].unbind()) for name in COLUMNS}, indexes)

    def _use(self, values: dict[str, list[Any]], indexes: range) -> None:
        """Count the tensors, and read every byte of them if so asked."""
        if {name: len(values[name]) for name in COLUMNS} != dict.fromkeys(COLUMNS, len(indexes) * SIZE):
            raise SystemExit("a get returned fewer tensors than it was asked for")
        if self._reads:
            found, put = sums_of(values), [self._sums[i] for i in indexes]
            if any(found[name] != sum(sums[name] for sums in put) for name in COLUMNS):
                raise SystemExit("a get returned other values than were put")


def sums_of(columns: dict[str, list[Any]]) -> dict[str, float]:
    """Return the sum of each column; exact, since the values are small multiples of a half."""
    return {name: sum(float(tensor.sum()) for tensor in tensors) for name, tensors in columns.items()}


async def _timed(items: Sequence[tuple[Any, ...]], call: Callable[..., Awaitable[None]], at_once: int) -> float:
    limit = anyio.CapacityLimiter(at_once)

    async def one(item: tuple[Any, ...]) -> None:
        async with limit:
            await call(*item)

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for item in items:
            tasks.start_soon(one, item)
    return time.perf_counter() - start


def copy_seconds(size: int) -> float:
    """Return the seconds of a plain copy into memory that has been touched."""
    import torch

    block, into = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    into.copy_(block)
    return time.perf_counter() - start


async def measure(given: argparse.Namespace) -> dict[str, float]:
    import ray

    from asyncrl.engine.data_plane.base import Partition
    from asyncrl.engine.data_plane.mooncake_service import MooncakeService, MooncakeSettings
    from asyncrl.engine.data_plane.shared_memory import shared_directory
    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.lifecycle.ray_runtime import ray_cluster

    groups = given.samples // SIZE
    pairs = [KINDS[backend] for backend in given.backend]
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair))
    seconds: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ray_cluster())
        memory = shared_directory("auto") or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plane = await TransferQueuePlane.start(storage_units=1, deadline_s=120, start_s=120, shared_memory=memory)
        stack.push_async_callback(plane.close)
        address = None
        if "mooncake" in given.backend:
            service = MooncakeService(MooncakeSettings(1, int(given.segment_gib * 2**30)), 60)
            stack.callback(service.close)
            address = service.address
        for kind, _ in pairs:
            await plane.register(Partition(kind, SIZE, COLUMNS, ("trainer",)))
        actor = ray.remote(num_cpus=0)(Worker)
        collector, rank = actor.remote(), actor.remote()
        size = await collector.attach.remote(groups, given.tokens, address)
        await rank.attach.remote(groups, given.tokens, address)
        for number in range(given.repeats + 1):
            for kind in kinds:
                taken = {"put": await collector.put.remote(kind, given.in_flight)}
                # Taking turns here too: whichever comes first may find the other's caches cold.
                for way in ("get", "get_unread") if number % 2 else ("get_unread", "get"):
                    taken[way] = await rank.get.remote(kind, given.groups_per_read, way == "get")
                await collector.clear.remote(kind)
                for way, value in taken.items():
                    seconds.setdefault(f"{kind}_{way}_s", []).append(value)
        for worker in (collector, rank):
            ray.kill(worker)
    copy_s = statistics.median([copy_seconds(size) for _ in range(given.repeats + 1)][1:])
    middle = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    found = {"samples": given.samples, "bytes": size, "repeats": given.repeats, "copy_s": copy_s, **middle}
    for kind, raw in pairs:
        for way, ratio in (("put", "put_ratio"), ("get", "get_ratio"), ("get_unread", "get_ratio_unread")):
            found[RATIOS[kind] + ratio] = middle[f"{raw}_{way}_s"] / middle[f"{kind}_{way}_s"]
            found[f"{RATIOS[kind]}{way}_share_of_copy"] = copy_s / middle[f"{kind}_{way}_s"]
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--groups-per-read", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each kind that count")
    parser.add_argument("--backend", default="simple,shared_memory", help=f"any of {','.join(KINDS)}")
    parser.add_argument("--segment-gib", type=float, default=1.0, help="memory of Mooncake's storage process")
    given = parser.parse_args()
    given.backend = given.backend.split(",")
    unknown = sorted(set(given.backend) - set(KINDS))
    if unknown:
        parser.error(f"--backend has {', '.join(unknown)}; what is known are {', '.join(KINDS)}")
    prepare(threads=1)
    print(json.dumps(anyio.run(measure, given)))


if __name__ == "__main__":
    main()
