"""One Ray cluster and one TransferQueue for all integration tests of the session.

A cluster can hold one TransferQueue, so tests share it and keep to partitions of their own.
What must kill or starve it runs in a process with a cluster of its own. What starts Ray runs one after the other in
one process of pytest-xdist's; all else can run beside it.

Most of what such a test spends are imports: of a command, and of five workers of Ray's. Commands are forks of a Python
that is warm, and so are the workers (ray_nursery.py). Some tests start the installed command, and Ray's own workers.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.lifecycle.ray_runtime import ray_cluster
from asyncrl.engine.testing.conformance.queue_in_process import queue_in_process

HERE = Path(__file__).parent
NURSERY = """
import pathlib, signal, sys
import ray_nursery

ray_nursery.forked_workers(pathlib.Path(sys.argv[1]))
signal.pause()
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    # Before pytest-xdist's own hook, which reads the groups.
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        used = getattr(item, "fixturenames", ())
        if "cluster" in used or item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif "warm_python" in used:
            # It starts no Ray, and can run beside what does.
            item.add_marker(pytest.mark.xdist_group("warm"))
    return (yield)


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop that lives as long as the session."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def cluster(
    portal: BlockingPortal, warm_python: "WarmPython", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Ray, on this node's loopback; its workers are forks of the warm Python."""
    with ExitStack() as stack:
        python = stack.enter_context(warm_python.nursery(tmp_path_factory.mktemp("nursery")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(python))
            stack.enter_context(portal.wrap_async_context_manager(ray_cluster()))
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


class WarmRun:
    """A command that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], pid: int, kept: "tempfile.TemporaryDirectory[str]") -> None:
        self.args = list(words)
        self.pid = pid
        self.returncode: int | None = None
        self._kept = kept

    def poll(self) -> int | None:
        code = Path(self._kept.name, "code")
        if self.returncode is None and code.exists():
            self.returncode = int(code.read_text(encoding="utf-8"))
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout, *(text.encode() for text in self._said()))
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        said = self._said()
        self._kept.cleanup()
        return said

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill all that runs, and forget what it said."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._kept.cleanup()

    def _said(self) -> tuple[str, str]:
        out, err = (Path(self._kept.name, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return out, err


class WarmPython:
    """Runs commands as `subprocess.run([sys.executable, ...])` does, from a process that has imported torch."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("warm_python.py")
        self._process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def start(self, folder: Path, *words: str, ray: bool = False) -> WarmRun:
        """Start `python WORDS` in a folder, in a session of its own; with `ray` also Ray's workers are warm."""
        assert self._process.stdin
        assert self._process.stdout
        kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        out, err = (str(Path(kept.name, name)) for name in ("out", "err"))
        asked = {"words": words, "cwd": str(folder), "out": out, "err": err, "ray": ray}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the warm Python ended with {self._process.wait()}"
        return WarmRun(words, int(answer), kept)

    def __call__(
        self, folder: Path, *words: str, timeout_s: float = 200.0, ray: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python WORDS` in a folder; `TimeoutExpired`, with all that runs killed, where it takes longer."""
        run = self.start(folder, *words, ray=ray)
        try:
            said = run.communicate(timeout_s)
        except subprocess.TimeoutExpired:
            run.kill()
            raise
        assert run.returncode is not None
        return subprocess.CompletedProcess(list(words), run.returncode, *said)

    @contextmanager
    def nursery(self, folder: Path) -> Iterator[Path]:
        """Have what stands in for `sys.executable` where Ray starts in this process; its files go to `folder`."""
        run = self.start(folder, "-c", NURSERY, str(folder))
        deadline = time.monotonic() + 100
        while not os.access(folder / "python", os.X_OK):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield folder / "python"
        run.kill()

    def close(self) -> None:
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
            self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Run `python WORDS` in a folder: `warm_python(tmp_path, "-m", "asyncrl", "ledger", "out")`."""
    warm = WarmPython()
    yield warm
    warm.close()
