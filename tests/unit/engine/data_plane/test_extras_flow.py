"""Extras of a task reach the models of the ranks through the plane of the local runtime."""

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.testing.conformance.plane_extras import extras_reach_the_model_with_their_samples


def test_extras_reach_the_model_with_their_samples() -> None:
    """D8's kind: packed over two ranks, with fillers, each sample has its own."""
    run_virtual(extras_reach_the_model_with_their_samples, LocalPlane(clock=virtual_clock))
