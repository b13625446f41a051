"""The gloo reducer between real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEMBER = """
import json, sys
import anyio, torch
from asyncrl.engine.offload import in_thread
from asyncrl.trainers.reducer import Gloo

async def main(rank, ranks, store, timeout_s):
    reducer = Gloo(rank=rank, ranks=ranks, store=store, timeout_s=timeout_s, offload=in_thread)
    await reducer.join()
    totals = []
    for i in range(3):
        values = torch.tensor([1.0, 10.0 ** rank, i + 0.5 * rank], dtype=torch.float64)
        totals.append((await reducer.sum(values)).tolist())
    print(json.dumps(totals))

anyio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
# Its threads end before Python does, or the process may abort at its end.
torch.distributed.destroy_process_group()
"""


def start(rank: int, ranks: int, store: Path, timeout_s: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(rank), str(ranks), str(store), str(timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(90)
def test_every_process_gets_the_sum_of_all(tmp_path: Path) -> None:
    members = [start(rank, 2, tmp_path / "store", 60.0) for rank in range(2)]
    for member in members:
        out, err = member.communicate(timeout=80)
        assert member.returncode == 0, err
        assert json.loads(out) == [[2.0, 11.0, 2 * i + 0.5] for i in range(3)]


@pytest.mark.timeout(90)
def test_a_process_that_nobody_joins_ends_with_an_error(tmp_path: Path) -> None:
    """No wait without a deadline: the other rank never comes."""
    member = start(0, 2, tmp_path / "store", 5.0)
    _, err = member.communicate(timeout=80)
    assert member.returncode != 0
    assert "DistStoreError" in err or "imeout" in err or "timed out" in err
