"""Tests on the real Mooncake: `.venv-mooncake/bin/pytest tests/mooncake`, after `scripts/install mooncake`; skipped
elsewhere. They start Ray, once."""

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncrl.engine.data_plane.mooncake import fault_of_installation
from asyncrl.engine.data_plane.mooncake_service import MooncakeSettings
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.lifecycle.ray_runtime import ray_cluster

HERE = Path(__file__).parent
SETTINGS = MooncakeSettings(units=2, segment_bytes=128 << 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    # Before pytest-xdist's own hook, which reads the groups.
    own = [item for item in items if item.path.is_relative_to(HERE)]
    fault = fault_of_installation() if own else None
    for item in own:
        item.add_marker(pytest.mark.xdist_group("ray"))
        if fault is not None:
            item.add_marker(pytest.mark.skip(reason=fault))
    return (yield)


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop that lives as long as the session."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def cluster(portal: BlockingPortal) -> Iterator[None]:
    with portal.wrap_async_context_manager(ray_cluster()):
        yield


@pytest.fixture(scope="module")
def plane(portal: BlockingPortal, cluster: None) -> Iterator[TransferQueuePlane]:
    """A plane on two storage processes of Mooncake, by its owner."""
    start = partial(TransferQueuePlane.start, storage_units=1, deadline_s=20, start_s=90, mooncake=SETTINGS)
    plane = portal.call(start)
    yield plane
    portal.call(plane.close)
