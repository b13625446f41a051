"""How fast groups move from a collector to a rank on one host, against raw per-sample TransferQueue, in one run.

4,096 samples of 1k tokens in groups of 8, four columns; a collector process puts, a rank process
reads, both attached to one TransferQueue on Ray. Ours: a row a group, bytes through shared memory
(`put_ratio`, `get_ratio`) or through TransferQueue's storage (`storage_*`). Raw: a row a sample, the
same four columns as jagged fields, one put a group. Both have `--in-flight` puts under way and read
`--groups-per-read` groups at a time. The last line is one JSON object; shares are of a plain copy of
the same bytes. The best of `--repeats` rounds, which alternate.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from asyncrl.engine.lifecycle.environment import prepare

COLUMNS = ("tokens", "logprobs", "mask", "advantages")
SIZE = 8


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

    async def attach(self, groups: int, tokens: int) -> int:
        """Return the bytes of all groups."""
        from asyncrl.engine.data_plane.payloads import InTransferQueue
        from asyncrl.engine.data_plane.tq import TransferQueuePlane
        from asyncrl.engine.records import GroupMeta
        from asyncrl.engine.records.keys import sample_keys

        self._plane = await TransferQueuePlane.attach(deadline_s=120, start_s=60)
        self._payloads = {"shared": self._plane._payloads, "storage": InTransferQueue(self._plane._client)}
        self._groups = [columns_of(i, tokens) for i in range(groups)]
        self._metas = [
            GroupMeta(sample_keys(0, i, SIZE), {"group": i, "version": 0, "reward": [0.0] * SIZE})
            for i in range(groups)
        ]
        return sum(t.nbytes for columns in self._groups for rows in columns.values() for t in rows)

    async def put(self, kind: str, in_flight: int) -> float:
        """Put all groups; return seconds."""
        call = self._put_raw if kind == "raw" else self._put_ours
        if kind != "raw":
            self._plane._payloads = self._payloads[kind]
        return await _timed([(kind, i) for i in range(len(self._metas))], call, in_flight)

    async def get(self, kind: str, groups_per_read: int) -> float:
        """Read all groups, one read after the other; return seconds."""
        call = self._get_raw if kind == "raw" else self._get_ours
        if kind != "raw":
            self._plane._payloads = self._payloads[kind]
        chunks = [range(at, at + groups_per_read) for at in range(0, len(self._metas), groups_per_read)]
        return await _timed([(kind, chunk) for chunk in chunks], call, 1)

    async def clear(self, kind: str) -> None:
        if kind == "raw":
            await self._plane._client.async_clear_partition(kind)
        else:
            await self._plane.clear(kind, [key for meta in self._metas for key in meta.keys])

    async def _put_ours(self, kind: str, index: int) -> None:
        await self._plane.put(kind, self._metas[index], self._groups[index])

    async def _get_ours(self, kind: str, indexes: range) -> None:
        keys = [key for i in indexes for key in self._metas[i].keys]
        values = await self._plane.read(kind, keys, COLUMNS)
        _check(values, len(keys))

    async def _put_raw(self, kind: str, index: int) -> None:
        import torch
        from tensordict import TensorDict

        client = self._plane._client
        meta = await client.async_kv_retrieve_meta(keys=list(self._metas[index].keys), partition_id=kind, create=True)
        rows = self._groups[index].items()
        fields = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows}
        meta.update_custom_meta([{"reward": 0.0}] * SIZE)
        await client.async_put(TensorDict(fields, batch_size=SIZE), meta)

    async def _get_raw(self, kind: str, indexes: range) -> None:
        client = self._plane._client
        names = [key for i in indexes for key in self._metas[i].keys]
        meta = await client.async_kv_retrieve_meta(keys=names, partition_id=kind, create=False)
        data = await client.async_get_data(meta.select_fields(list(COLUMNS)))
        _check({name: list(data[name].unbind()) for name in COLUMNS}, len(names))


def _check(values: dict[str, list[Any]], samples: int) -> None:
    """Touch every tensor, so that a mapped page is a read page."""
    assert all(len(values[name]) == samples for name in COLUMNS)
    assert sum(float(t.sum()) for t in values["mask"]) == sum(len(t) for t in values["tokens"])


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
    from asyncrl.engine.data_plane.shared_memory import shared_directory
    from asyncrl.engine.data_plane.tq import TransferQueuePlane
    from asyncrl.engine.lifecycle.ray_runtime import ray_cluster

    groups = given.samples // SIZE
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as other:
        async with ray_cluster():
            memory = shared_directory("auto") or Path(other)
            plane = await TransferQueuePlane.start(storage_units=1, deadline_s=120, start_s=120, shared_memory=memory)
            for kind in ("shared", "storage"):
                await plane.register(Partition(kind, SIZE, COLUMNS, ("trainer",)))
            actor = ray.remote(num_cpus=0)(Worker)
            collector, rank = actor.remote(), actor.remote()
            size = await collector.attach.remote(groups, given.tokens)
            await rank.attach.remote(groups, given.tokens)
            for _ in range(given.repeats):
                for kind in ("shared", "storage", "raw"):
                    put = await collector.put.remote(kind, given.in_flight)
                    get = await rank.get.remote(kind, given.groups_per_read)
                    await collector.clear.remote(kind)
                    for name, value in ((f"{kind}_put_s", put), (f"{kind}_get_s", get)):
                        best[name] = min(value, best.get(name, value))
            await plane.close()
    copy_s = min(copy_seconds(size) for _ in range(3))
    found = {"samples": given.samples, "bytes": size, "copy_s": copy_s, **best}
    for way in ("put", "get"):
        found[f"{way}_ratio"] = best[f"raw_{way}_s"] / best[f"shared_{way}_s"]
        found[f"{way}_share_of_copy"] = copy_s / best[f"shared_{way}_s"]
        found[f"storage_{way}_ratio"] = best[f"raw_{way}_s"] / best[f"storage_{way}_s"]
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--groups-per-read", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    prepare(threads=1)
    print(json.dumps(anyio.run(measure, given)))


if __name__ == "__main__":
    main()
