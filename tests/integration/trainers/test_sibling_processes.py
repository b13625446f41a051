"""Sibling ranks as real gloo processes: the leader alone reads and writes, beside sums in another group."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.trainers.reducer import MeetingPoint

MEMBER = """
import json, sys
import anyio, torch
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import DataPlaneError
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.records import GroupMeta
from asyncrl.trainers.fetch import fetch_for
from asyncrl.trainers.reducer import Gloo
from asyncrl.trainers.siblings import GlooSiblings

KEYS = tuple(f"v0_p0_g{i}" for i in range(3))

async def main(rank, ranks, meeting):
    reducer = Gloo(rank=rank, ranks=ranks, meeting=meeting, timeout_s=60, blocking=in_thread)
    await reducer.join()
    siblings = GlooSiblings(list(range(ranks)), timeout_s=60, blocking=in_thread)
    plane = LocalPlane()
    # The plane of this process is empty but for the leader's: whoever else reads it fails.
    await plane.register(Partition("train", 3, ("tokens", "logprobs"), ("trainer",)))
    if rank == 0:
        tokens = [torch.arange(n, dtype=torch.int32) for n in (3, 0, 5)]
        logprobs = [torch.full((n,), -0.5, dtype=torch.bfloat16) for n in (2, 1, 4)]
        await plane.put("train", GroupMeta(KEYS, {"version": 0, "group": 0}),
                        {"tokens": tokens, "logprobs": logprobs})
    fetch = fetch_for("auto", plane, "train", siblings=siblings)
    got, sums = {}, []

    async def add():
        for _ in range(20):
            sums.append(float(await reducer.sum(torch.ones(1))))

    async def read():
        for _ in range(5):
            got.update(await fetch.read(KEYS, ["tokens", "logprobs"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add)
        tasks.start_soon(read)
    error = ""
    try:
        await fetch.read(["v9_p9_g9"], ["tokens"])
    except DataPlaneError as refused:
        error = str(refused)
    print(json.dumps({
        "tokens": [value.tolist() for value in got["tokens"]],
        "logprobs": [value.tolist() for value in got["logprobs"]],
        "dtype": str(got["logprobs"][0].dtype),
        "sums": sums, "error": error, "index": siblings.index,
    }))

anyio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
# The threads of gloo's groups end before Python does, or the process may abort at its end.
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(90)
def test_three_siblings_share_what_their_leader_reads(tmp_path: Path, warm_python: Any) -> None:
    """Reads ahead run beside all-reduces of another group; a failed read fails on all, with its reason."""
    point = MeetingPoint()
    members = [warm_python.start(tmp_path, "-c", MEMBER, str(rank), "3", point.address) for rank in range(3)]
    for rank, member in enumerate(members):
        out, err = member.communicate(timeout=80)
        assert member.returncode == 0, err
        found = json.loads(out)
        assert found["tokens"] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
        assert found["logprobs"] == [[-0.5] * 2, [-0.5], [-0.5] * 4]
        assert found["dtype"] == "torch.bfloat16"
        assert found["sums"] == [3.0] * 20
        assert found["index"] == rank
        assert "v9_p9_g9" in found["error"]
