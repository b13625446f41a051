"""Extras of a task reach the models of the ranks through TransferQueue, with either payloads."""

from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal

from asyncrl.engine.testing.conformance.plane_extras import extras_reach_the_model_with_their_samples
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process


@pytest.mark.parametrize("shared", [False, True], ids=["storage", "shared memory"])
def test_extras_reach_the_model_with_their_samples(portal: BlockingPortal, shared: bool, tmp_path: Path) -> None:
    """D8's kind: packed over two ranks, with fillers, each sample has its own."""
    plane = queue_in_process(shared_memory=tmp_path if shared else None)
    try:
        portal.call(extras_reach_the_model_with_their_samples, plane)
    finally:
        portal.call(plane.close)
