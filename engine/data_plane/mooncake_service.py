"""Mooncake's processes of a run: its master, and the storage processes that lend it their memory.

Invariant: the master that is started here is ended here, and no other is touched. TransferQueue's own start of Mooncake
ends every master of the host and leaves its own running, so it is not used.

Rows are in the memory of storage processes alone, which are Ray actors as TransferQueue's are: collectors and ranks
lend none, so a row outlives the process that put it.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.engine.data_plane.mooncake import MooncakeAddress, MooncakeStore, library_folder, load
from asyncrl.engine.errors import DataPlaneError, Overdue

_RDMA_DEVICES = Path("/sys/class/infiniband")
_CGROUP = Path("/sys/fs/cgroup")
_POLL_S = 0.02
_END_S = 3.0
_STARTS = 3


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How much memory each of `units` storage processes lends, and how bytes travel."""

    units: int
    segment_bytes: int
    protocol: str = "auto"
    devices: str = ""


def choose_protocol(option: str, devices: Path = _RDMA_DEVICES) -> str:
    """Return tcp or rdma; `auto` is rdma where this node has a device for it."""
    if option != "auto":
        return option
    return "rdma" if devices.is_dir() and any(devices.iterdir()) else "tcp"


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process may still take, by its node and by its container."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((cgroup / "memory.current").read_text(encoding="ascii")))
    return free


def check_memory(settings: MooncakeSettings, units: int, free: int) -> None:
    """DataPlaneError if `units` storage processes of one node lend more memory than the node has free."""
    wanted = units * settings.segment_bytes
    if wanted > free:
        raise DataPlaneError(
            f"{units} storage processes of data_plane.mooncake_segment_gib {settings.segment_bytes / 2**30:g} lend "
            f"{wanted / 2**30:.1f} GiB, and this node has {free / 2**30:.1f} GiB free; make segments smaller "
            "(--set data_plane.mooncake_segment_gib=...)"
        )


class MooncakeMaster:
    """The process that knows where every object is. It listens on `host` alone."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Start it; DataPlaneError if it ends, Overdue if it does not listen within `timeout_s`."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 It is open as long as the master runs.
        program = Path(load().__file__).with_name("mooncake_master")
        until = time.monotonic() + timeout_s
        for _ in range(_STARTS):
            # Both ports were free a moment ago; if one is taken meanwhile, the master ends.
            port, metrics_port = _free_ports(host)
            self.address = f"{host}:{port}"
            self._process = subprocess.Popen(
                _command(program, host, port, metrics_port),
                env={**os.environ, "LD_LIBRARY_PATH": _library_path()},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C is for the driver, which settles the run before this ends.
                start_new_session=True,
            )
            try:
                if self._listens(port, until):
                    return
            except BaseException:
                self.close()
                raise
        raise DataPlaneError(f"Mooncake's master did not start: {self._said()}")

    async def ping(self) -> None:
        """DataPlaneError if it has ended."""
        if self._process.poll() is not None:
            raise DataPlaneError(f"Mooncake's master ended with {self._process.returncode}: {self._said()}")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listens(self, port: int, until: float) -> bool:
        """Wait until this process, and no other, listens on the port; False if it ended."""
        process = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            with suppress(psutil.Error):
                ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                if port in ports:
                    return True
            if time.monotonic() > until:
                raise Overdue(f"Mooncake's master did not listen in time: {self._said()}")
            time.sleep(_POLL_S)
        return False

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-500:] or "it said nothing"


class _Unit:
    """A process that lends the store its memory; a Ray actor."""

    def __init__(self, address: MooncakeAddress, settings: MooncakeSettings, units_here: int) -> None:
        check_memory(settings, units_here, free_bytes())
        self._store = MooncakeStore(address, node_address(), segment_bytes=settings.segment_bytes)

    async def ping(self) -> None:
        """Answer."""


class MooncakeService:
    """All of a run's Mooncake processes, by their owner. Making and closing it block."""

    def __init__(self, settings: MooncakeSettings, timeout_s: float, nodes: Sequence[str] = ()) -> None:
        """Start them on `nodes` (Ray's ids) by turns, without on all of the cluster; nothing stays if that fails."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = nodes or [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        units_here = -(-settings.units // len(nodes))
        self._units: list[Any] = []
        self.store: MooncakeStore | None = None
        self._master = MooncakeMaster(node_address(), timeout_s)
        self.address = MooncakeAddress(self._master.address, choose_protocol(settings.protocol), settings.devices)
        actor = ray.remote(num_cpus=0, max_restarts=0)(_Unit)
        try:
            for number in range(settings.units):
                there = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
                placed = actor.options(scheduling_strategy=there)
                self._units.append(placed.remote(self.address, settings, units_here))
            ray.get([unit.ping.remote() for unit in self._units], timeout=timeout_s)
            self.store = MooncakeStore(self.address, node_address())
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise Overdue(f"Mooncake's storage processes did not start within {timeout_s:g} s") from None
            if isinstance(error, ray.exceptions.RayError):
                raise DataPlaneError(f"a storage process of Mooncake did not start: {error}") from error
            raise

    def pings(self) -> Sequence[Callable[[], Awaitable[Any]]]:
        """Return calls that raise when a process is gone."""
        return [self._master.ping, *(unit.ping.remote for unit in self._units)]

    def close(self) -> None:
        import ray

        try:
            for unit in self._units:
                ray.kill(unit)
        finally:
            self._master.close()
            if self.store is not None:
                self.store.close()


def node_address() -> str:
    """Return the address of this process's node, as Ray has it."""
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address


def _command(program: Path, host: str, port: int, metrics_port: int) -> list[str]:
    return [
        str(program),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",
        # A row stays until it is cleared, however full the store is.
        "--eviction_high_watermark_ratio=1.0",
        "--eviction_ratio=0.0",
        "--logtostderr=true",
        "--minloglevel=2",
    ]


def _library_path() -> str:
    others = os.environ.get("LD_LIBRARY_PATH")
    return os.pathsep.join([str(library_folder()), *([others] if others else [])])


def _free_ports(host: str) -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind((host, 0))
        second.bind((host, 0))
        return first.getsockname()[1], second.getsockname()[1]
