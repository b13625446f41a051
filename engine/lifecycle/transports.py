"""Which way weights take from rank 0 to the collectors, by where they compute; and the transports of that way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.data_plane.shared_memory import SharedMemory, shared_directory
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.device import choose_device, collector_place
from asyncrl.engine.weights.base import InProcess, WeightTransport
from asyncrl.engine.weights.broadcast import Broadcast
from asyncrl.engine.weights.cuda_ipc import CudaIPC
from asyncrl.engine.weights.delta import Delta
from asyncrl.engine.weights.folder import Folder
from asyncrl.engine.weights.shared_file import SharedFile

Way = Literal["in_process", "object_store", "shared_memory", "cuda_ipc", "nccl", "folder"]

_FROM_FILES = ("vllm", "http")
_ON_GPUS = ("cuda_ipc", "nccl")
_NEED_RAY = ("object_store", *_ON_GPUS)


def choose_way(config: RunConfig, *, count_gpus: Callable[[], int] = torch.cuda.device_count) -> Way:
    """Return the way that a run's weights take; ConfigError for one that cannot work here.

    `auto` is `in_process` for `runtime: local`. On Ray it is `object_store` if rank 0 or a collector computes on a CPU
    or they have their devices in turns, `nccl` if each of them has a GPU of its own, and `cuda_ipc` if some share one.
    Example: with 2 ranks and 2 collectors on 4 GPUs, rank 0 has the first and the collectors have the third and fourth:
    `nccl`. On 2 GPUs the collectors have the first and the second: `cuda_ipc`.
    """
    asked = config.trainer.weight_transport
    if config.run.runtime == "local":
        if asked in _NEED_RAY:
            raise _refused(asked, "run.runtime is local, in which all is one process", "auto, shared_memory or folder")
        return _checked("in_process" if asked == "auto" else asked, config)
    devices = _devices(config, count_gpus)
    if asked == "auto":
        # Weights on their way are on nobody's device while it is another's turn.
        if config.cluster.time_slicing is not None or any(device.type != "cuda" for device in devices):
            return "object_store"
        return "nccl" if len(set(devices)) == len(devices) else "cuda_ipc"
    if asked in _ON_GPUS and any(device.type != "cuda" for device in devices):
        why = (
            f"collector.engine {config.collector.engine} takes weights from files"
            if config.collector.engine in _FROM_FILES
            else f"rank 0 and the collectors compute on {', '.join(map(str, devices))}"
        )
        raise _refused(asked, why, "auto, object_store, shared_memory or folder")
    if asked == "nccl" and len(set(devices)) < len(devices):
        places = ", ".join(map(str, devices))
        raise _refused(asked, f"rank 0 and the collectors, on {places}, have no GPU each", "auto or cuda_ipc")
    return _checked(asked, config)


def choose_way_on_cluster(config: RunConfig, *, own_gpus: bool, one_node: bool) -> Way:
    """Return the way on a cluster that is joined; ConfigError for one that cannot work there.

    Each part sees only the GPUs that it asked for. `auto` is `nccl` if rank 0 and all collectors have `own_gpus`, whole
    ones, and else `object_store`, which crosses nodes.
    """
    asked = config.trainer.weight_transport
    own_gpus = own_gpus and config.collector.engine not in _FROM_FILES
    if asked == "auto":
        return "nccl" if own_gpus else "object_store"
    if asked == "cuda_ipc":
        raise _refused(asked, "on a Ray cluster that is joined no part sees another's GPU", "auto, nccl or folder")
    if asked == "nccl" and not own_gpus:
        raise _refused(asked, "rank 0 and the collectors have no GPU each", "auto, object_store or folder")
    if asked == "shared_memory" and not one_node:
        raise _refused(asked, "the parts of the run are on several nodes", "auto, object_store or folder")
    return _checked(asked, config)


@contextmanager
def weight_directory(config: RunConfig, way: Way) -> Iterator[Path | None]:
    """Make a directory of the run's own for a way through files, and remove it at the end; None for other ways.

    What a killed run left goes with the next start of one that uses the same parent.
    """
    if way == "folder":
        parent = Path(config.trainer.weight_folder or "")
    elif way == "shared_memory":
        found = shared_directory(config.data_plane.shared_memory)
        if found is None:
            raise _refused(way, "there is no shared memory: /dev/shm has less than a GiB free", "auto or object_store")
        parent = found
    else:
        yield None
        return
    memory = SharedMemory.create(parent)
    try:
        yield memory.path
    finally:
        memory.close()


@dataclass(frozen=True, slots=True)
class Transports:
    """What sender and receivers of a run must agree on; it travels to their processes.

    `directory` is of a way through files. Those that broadcast meet at the address `meeting`, within `meet_timeout_s`.
    """

    way: Way
    delta: bool
    directory: Path | None
    meeting: str
    meet_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig, way: Way, directory: Path | None, meeting: str = "") -> "Transports":
        trainer = config.trainer
        return cls(way, trainer.weight_delta, directory, meeting, trainer.publish_timeout_s / 2)

    def build(self, name: str, device: torch.device, *, blocking: Blocking[Any]) -> WeightTransport:
        """Build the transport of the process called `name`, which computes on `device`."""
        plain = self._plain(name, device, blocking)
        return Delta(plain, blocking=blocking) if self.delta else plain

    def _plain(self, name: str, device: torch.device, blocking: Blocking[Any]) -> WeightTransport:
        match self.way:
            case "in_process":
                return InProcess()
            case "object_store":
                # Ray takes a second to import, and most tests go without.
                from asyncrl.engine.weights.ray_store import RayObjectStore

                return RayObjectStore()
            case "cuda_ipc":
                return CudaIPC(device, blocking=blocking)
            case "nccl":
                return Broadcast(
                    name, self.meeting, backend="nccl", device=device, timeout_s=self.meet_timeout_s, blocking=blocking
                )
        assert self.directory is not None
        return SharedFile(self.directory) if self.way == "shared_memory" else Folder(self.directory, blocking=blocking)


def _devices(config: RunConfig, count_gpus: Callable[[], int]) -> list[torch.device]:
    """Return where weights come from, and where each collector wants them: not on a GPU if its engine loads files."""
    collector = config.collector
    asked = "cpu" if collector.engine in _FROM_FILES else collector.device
    return [
        choose_device(config.trainer.device, 0, count_gpus=count_gpus),
        *(choose_device(asked, collector_place(config, i), count_gpus=count_gpus) for i in range(collector.count)),
    ]


def _checked(way: Way, config: RunConfig) -> Way:
    folder = config.trainer.weight_folder
    if way == "folder" and not (folder and Path(folder).is_dir()):
        raise ConfigError(f"trainer.weight_folder is {folder!r}; it must be a directory that can be written to")
    if way == "shared_memory" and config.data_plane.shared_memory is None:
        raise _refused(way, "data_plane.shared_memory is null", "auto, object_store or folder")
    return way


def _refused(asked: str, why: str, must: str) -> ConfigError:
    return ConfigError(f"trainer.weight_transport is {asked!r}, and {why}; it must be {must}")
