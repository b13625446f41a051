"""How fast groups move from a collector to a rank, against raw per-sample TransferQueue, in one run.

4,096 samples of 1k tokens in groups of 8, four columns, TransferQueue's own controller and storage
over loopback in this process. Ours: one row and one buffer a group. Raw: a row a sample, one put a
group, the same four columns as jagged fields. The last line is one JSON object; the share of a
plain memory copy of the same bytes stands beside.
"""

import argparse
import json
import time
from typing import Any

import anyio
import torch
from tensordict import TensorDict

from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys

COLUMNS = ("tokens", "logprobs", "mask", "advantages")
SIZE = 8


def columns_of(group: int, tokens: int) -> dict[str, list[torch.Tensor]]:
    lengths = [tokens - (group * SIZE + i) % 16 for i in range(SIZE)]
    return {
        "tokens": [torch.arange(n, dtype=torch.int32) for n in lengths],
        "logprobs": [torch.full((n,), -0.5) for n in lengths],
        "mask": [torch.ones(n, dtype=torch.uint8) for n in lengths],
        "advantages": [torch.zeros(n) for n in lengths],
    }


def meta_of(group: int) -> GroupMeta:
    return GroupMeta(sample_keys(0, group, SIZE), {"group": group, "version": 0, "reward": [0.0] * SIZE})


async def ours(plane: Any, groups: list[dict[str, list[torch.Tensor]]], batch: int) -> tuple[float, float]:
    """Return seconds to put all groups and to read all of them, `batch` groups a read."""
    await plane.register(Partition("ours", SIZE, COLUMNS, ("trainer",)))
    metas = [meta_of(i) for i in range(len(groups))]
    start = time.perf_counter()
    for meta, columns in zip(metas, groups, strict=True):
        await plane.put("ours", meta, columns)
    put = time.perf_counter() - start
    start = time.perf_counter()
    for at in range(0, len(metas), batch):
        keys = [key for meta in metas[at : at + batch] for key in meta.keys]
        values = await plane.read("ours", keys, COLUMNS)
        assert len(values["tokens"]) == len(keys)
    get = time.perf_counter() - start
    await plane.clear("ours", [key for meta in metas for key in meta.keys])
    return put, get


async def raw(client: Any, groups: list[dict[str, list[torch.Tensor]]], batch: int) -> tuple[float, float]:
    keys = [meta_of(i).keys for i in range(len(groups))]
    start = time.perf_counter()
    for names, columns in zip(keys, groups, strict=True):
        meta = await client.async_kv_retrieve_meta(keys=list(names), partition_id="raw", create=True)
        fields = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
        await client.async_put(TensorDict(fields, batch_size=SIZE), meta)
    put = time.perf_counter() - start
    start = time.perf_counter()
    for at in range(0, len(keys), batch):
        names = [key for group in keys[at : at + batch] for key in group]
        meta = await client.async_kv_retrieve_meta(keys=names, partition_id="raw", create=False)
        data = await client.async_get_data(meta.select_fields(list(COLUMNS)))
        assert len(data["tokens"].unbind()) == len(names)
    get = time.perf_counter() - start
    await client.async_clear_partition("raw")
    return put, get


async def measure(samples: int, tokens: int, batch: int, repeats: int) -> dict[str, float]:
    plane = TransferQueuePlane.in_process(deadline_s=120)
    groups = [columns_of(i, tokens) for i in range(samples // SIZE)]
    size = sum(t.nbytes for columns in groups for rows in columns.values() for t in rows)
    best: dict[str, float] = {}
    for _ in range(repeats):
        mine = await ours(plane, groups, batch)
        theirs = await raw(plane._client, groups, batch)
        found = {"put_s": mine[0], "get_s": mine[1], "raw_put_s": theirs[0], "raw_get_s": theirs[1]}
        best = {name: min(value, best.get(name, value)) for name, value in found.items()}
    block = torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    block.clone()
    copy_s = time.perf_counter() - start
    await plane.close()
    return {
        "bytes": size,
        **{name: round(value, 3) for name, value in best.items()},
        "put_ratio": round(best["raw_put_s"] / best["put_s"], 2),
        "get_ratio": round(best["raw_get_s"] / best["get_s"], 2),
        "put_share_of_copy": round(copy_s / best["put_s"], 4),
        "get_share_of_copy": round(copy_s / best["get_s"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--groups-per-read", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    print(json.dumps(anyio.run(measure, given.samples, given.tokens, given.groups_per_read, given.repeats)))


if __name__ == "__main__":
    main()
