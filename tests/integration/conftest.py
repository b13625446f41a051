"""One Ray cluster and one TransferQueue for all integration tests of the session.

A cluster can hold one TransferQueue, so tests share it and keep to partitions of their own.
What must kill or starve it runs in a process with a cluster of its own.
"""

from collections.abc import Iterator
from functools import partial

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.lifecycle.ray_runtime import ray_cluster


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop that lives as long as the session."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def cluster(portal: BlockingPortal) -> Iterator[None]:
    """Ray, on this node's loopback."""
    with portal.wrap_async_context_manager(ray_cluster()):
        yield


@pytest.fixture(scope="session")
def ray_plane(
    portal: BlockingPortal, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransferQueuePlane]:
    """The session's TransferQueue, by its owner; payloads in shared memory, as by default."""
    start = partial(TransferQueuePlane.start, storage_units=2, deadline_s=20, start_s=90)
    plane = portal.call(partial(start, shared_memory=tmp_path_factory.mktemp("memory")))
    yield plane
    portal.call(plane.close)


@pytest.fixture(scope="session")
def in_process_plane(portal: BlockingPortal) -> Iterator[TransferQueuePlane]:
    """TransferQueue's own controller and storage, payloads in it, in this process, without Ray."""
    plane = TransferQueuePlane.in_process(deadline_s=20)
    yield plane
    portal.call(plane.close)
