"""Where processes of ranks find each other."""

import os
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

from asyncrl.trainers.reducer import MeetingPoint


def listening() -> set[tuple[str, int]]:
    found = psutil.Process(os.getpid()).net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def test_ranks_meet_over_loopback_alone_and_nothing_stays() -> None:
    """FOUND-C12: no file that only a living driver removes."""
    before = listening()
    point = MeetingPoint()
    host, _, port = point.address.rpartition(":")
    assert listening() - before == {("127.0.0.1", int(port))}
    ranks = [
        TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        for _ in range(2)
    ]
    ranks[0].set("who", "rank 0")
    assert ranks[1].get("who") == b"rank 0"
    del point
    assert listening() == before
