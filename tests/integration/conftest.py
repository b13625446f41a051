"""One Ray cluster and one TransferQueue for all integration tests of the session.

A cluster can hold one TransferQueue, so tests share it and keep to partitions of their own.
What must kill or starve it runs in a process with a cluster of its own. All these tests run one after the other in one
process of pytest-xdist's, but for those that use the warm Python alone.
"""

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.lifecycle.ray_runtime import ray_cluster
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    # Before pytest-xdist's own hook, which reads the groups.
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        # What uses the warm Python alone starts no Ray, and can run beside what does.
        beside = "warm_python" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("ray")
        item.add_marker(pytest.mark.xdist_group("warm" if beside else "ray"))
    return (yield)


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
    plane = queue_in_process(deadline_s=20)
    yield plane
    portal.call(plane.close)


class WarmPython:
    """Runs commands as `subprocess.run([sys.executable, ...])` does, from a process that has imported torch."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("warm_python.py")
        self._process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __call__(self, folder: Path, *words: str, timeout_s: float = 200.0) -> "subprocess.CompletedProcess[str]":
        """Run `python WORDS` in a folder; `TimeoutExpired`, with all that runs killed, where it takes longer."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory() as kept:
            out, err = Path(kept, "out"), Path(kept, "err")
            asked = {"words": words, "cwd": str(folder), "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                self.close()
                raise subprocess.TimeoutExpired(list(words), timeout_s, out.read_bytes(), err.read_bytes())
            answer = self._process.stdout.readline()
            assert answer, f"the warm Python ended with {self._process.wait()}"
            said, complained = (path.read_text(encoding="utf-8") for path in (out, err))
            return subprocess.CompletedProcess(list(words), int(answer), said, complained)

    def close(self) -> None:
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
            self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Run `python WORDS` in a folder: `warm_python(tmp_path, "-m", "asyncrl", "ledger", "out")`."""
    warm = WarmPython()
    yield warm
    warm.close()
