"""Which processes a start ends: those of a driver that is gone, and nobody else's."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.engine.lifecycle.orphans import MARK, end_orphans, mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc to look at")
SLEEP = "import time; time.sleep(60)"
RAYS = [sys.executable, "-c", SLEEP, "/usr/lib/python3/site-packages/ray/_private/workers/default_worker.py"]
OTHERS = [sys.executable, "-c", SLEEP, "/home/ray/anaconda3/bin/judge.py ray::Judge"]
"""A user's own, in an image of Ray's."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, words: list[str], marked: str | None) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **({} if marked is None else {MARK: marked})}
    process = stack.enter_context(subprocess.Popen(words, env=environment))
    stack.callback(process.kill)
    return process


def test_only_what_a_dead_driver_of_this_host_left_is_ended(stack: ExitStack) -> None:
    """FOUND-C12. A process id that another process has by now, and one of another container, are not its driver's."""
    where, pid, ticks = mark().split(" ")
    dead = start(stack, ["true"], None)
    dead.wait()
    left = [
        start(stack, RAYS, f"{where} {dead.pid} {ticks}"),
        start(stack, RAYS, f"{where} {pid} {int(ticks) - 1}"),
    ]
    alive = [
        start(stack, RAYS, mark()),
        start(stack, RAYS, None),
        start(stack, OTHERS, f"{where} {dead.pid} {ticks}"),
        start(stack, RAYS, f"pid:[1] {dead.pid} {ticks}"),
        start(stack, RAYS, ""),
    ]
    # Until a process has its own command line and environment it looks as this one does.
    deadline = time.monotonic() + 20
    while any(b"time.sleep" not in Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in (*left, *alive)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(end_orphans()) >= {process.pid for process in left}
    assert [process.wait(10) for process in left] == [-9, -9]
    assert [process.poll() for process in alive] == [None] * 5
