"""Sums of GPU tensors between processes through NCCL."""

import json
import subprocess
import sys

import pytest

from asyncrl.trainers.reducer import MeetingPoint

MEMBER = """
import json, sys
import anyio, torch
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.trainers.reducer import Gloo

async def main(rank, ranks, meeting):
    torch.cuda.set_device(rank)
    reducer = Gloo(rank=rank, ranks=ranks, meeting=meeting, timeout_s=60.0, blocking=in_thread, nccl=True)
    await reducer.join()
    on_gpu = await reducer.sum(torch.tensor([1.0, 10.0 ** rank], device=f"cuda:{rank}"))
    on_cpu = await reducer.sum(torch.tensor([1.0, 10.0 ** rank], dtype=torch.float64))
    print(json.dumps([on_gpu.tolist(), on_cpu.tolist()]))

anyio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
# Its threads end before Python does, or the process may abort at its end.
torch.distributed.destroy_process_group()
"""


@pytest.mark.gpus(2)
@pytest.mark.timeout(120)
def test_every_process_gets_the_sum_of_all() -> None:
    command = [sys.executable, "-c", MEMBER]
    point = MeetingPoint()
    members = [
        subprocess.Popen(
            [*command, str(rank), "2", point.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for member in members:
        out, err = member.communicate(timeout=100)
        assert member.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == [[2.0, 11.0], [2.0, 11.0]]
