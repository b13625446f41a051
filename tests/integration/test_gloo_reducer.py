"""The gloo reducer between real processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.trainers.reducer import MeetingPoint

MEMBER = """
import json, sys
import anyio, torch
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.trainers.reducer import Gloo

async def main(rank, ranks, meeting, timeout_s):
    reducer = Gloo(rank=rank, ranks=ranks, meeting=meeting, timeout_s=timeout_s, blocking=in_thread)
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


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, warm_python: Any) -> Start:
    """Start a rank: `start(rank, ranks, meeting, timeout_s)`."""
    return lambda *arguments: warm_python.start(tmp_path, "-c", MEMBER, *map(str, arguments))


@pytest.mark.timeout(90)
def test_every_process_gets_the_sum_of_all(start: Start) -> None:
    """FOUND-C12: they meet without a file."""
    point = MeetingPoint()
    members = [start(rank, 2, point.address, 60.0) for rank in range(2)]
    for member in members:
        out, err = member.communicate(timeout=80)
        assert member.returncode == 0, err
        assert json.loads(out) == [[2.0, 11.0, 2 * i + 0.5] for i in range(3)]


@pytest.mark.timeout(90)
def test_a_process_that_nobody_joins_ends_with_an_error(start: Start) -> None:
    """No wait without a deadline: the other rank never comes."""
    point = MeetingPoint()
    member = start(0, 2, point.address, 5.0)
    _, err = member.communicate(timeout=80)
    assert member.returncode != 0
    assert "DistStoreError" in err or "imeout" in err or "timed out" in err
