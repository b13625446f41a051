"""The Ray actors: thin processes around a Collector or a TrainerRank.

Each is built in two steps: the constructor loads the model while TransferQueue starts, and `connect` attaches to the
data plane. Blocking work runs in threads, so that the event loop stays free.
"""

import os
import pickle
import sys
from dataclasses import replace
from typing import Any

import ray
import torch

from asyncrl.configs import RunConfig
from asyncrl.configs.sections.trainer import Trainer
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.backends import rank_device
from asyncrl.engine.lifecycle.evaluation import build_evaluator
from asyncrl.engine.lifecycle.family import mark_family
from asyncrl.engine.lifecycle.network import listen_at
from asyncrl.engine.lifecycle.parts import (
    all_taggers,
    build_collector,
    build_rank,
    collector_model,
    rank_model,
)
from asyncrl.engine.lifecycle.ray_process import RayProcess
from asyncrl.engine.lifecycle.scorers import ray_scorer
from asyncrl.engine.lifecycle.transports import Transports
from asyncrl.engine.lifecycle.working_folder import enter_copy
from asyncrl.engine.model.device import choose_device, collector_place, on_device
from asyncrl.engine.weights.ray_store import RayObjectStore
from asyncrl.trainers.backends.sharded import Shards
from asyncrl.trainers.extras import extras_of
from asyncrl.trainers.links import meet


class _ActorProcess:
    """Calls methods of the collector or rank in it. `user_path` goes last on the path, for the user's modules.

    None is the copy of the user's folder on this node.
    """

    def __init__(self, config: RunConfig, index: int, user_path: str | None, *, threads: int) -> None:
        mark_family()
        torch.set_num_threads(threads)
        folder = enter_copy() if user_path is None else user_path
        if folder not in sys.path:
            sys.path.append(folder)
        self._config = config
        self._index = index
        self._served: Any = None

    async def _plane(self) -> TransferQueuePlane:
        plane = self._config.data_plane
        return await TransferQueuePlane.attach(
            deadline_s=plane.deadline_s, start_s=self._config.supervision.start_timeout_s
        )

    async def process(self) -> RayProcess:
        return RayProcess.own()

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the collector or rank."""
        return await getattr(self._served, method)(*args, **kwargs)


def _has_own_gpu(device: torch.device, ranks: int) -> bool:
    """Return whether each rank has a GPU of its own: one that Ray gave it alone, or one of those taken in turn."""
    if device.type != "cuda":
        return False
    given = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
    return given >= 1 or (not given and torch.cuda.device_count() >= ranks)


def _shards(trainer: Trainer, device: torch.device, *, nccl: bool) -> Shards:
    """Return which ranks keep a model together; ConfigError if two of them compute on one GPU."""
    if device.type == "cuda" and not nccl:
        raise ConfigError(
            f"trainer.sharding is {trainer.sharding}, and some of the {trainer.ranks} ranks share a GPU; sharding "
            "needs one GPU per rank, so trainer.ranks must be less, or trainer.device cpu"
        )
    return Shards(device, ranks=trainer.model_ranks)


class CollectorActor(_ActorProcess):
    """`pickled_taggers` are those of filters that are not in the configuration, by tag.

    They come as bytes, because they can be read only once the user's modules can be imported.
    """

    def __init__(self, config: RunConfig, index: int, user_path: str | None, pickled_taggers: bytes) -> None:
        super().__init__(config, index, user_path, threads=config.collector.threads)
        self._taggers = all_taggers(config, pickle.loads(pickled_taggers))
        # Its processes start while the model loads.
        self._scorer = ray_scorer(config, taggers=self._taggers)
        self._model = collector_model(config, collector_place(config, index))

    async def connect(self, transports: Transports) -> None:
        """Attach to the data plane; weights come as `transports` says."""
        device = choose_device(self._config.collector.device, collector_place(self._config, self._index))
        listen_at(ray.util.get_node_ip_address())
        self._served = build_collector(
            self._config,
            self._index,
            model=self._model,
            scorer=self._scorer,
            plane=await self._plane(),
            transport=transports.build(f"collector{self._index}", device, blocking=in_thread),
            blocking=in_thread,
            taggers=self._taggers,
        )


class EvaluatorActor(_ActorProcess):
    """`config` is the `evaluation_config`; `place` counts the run's processes, which take GPUs in turn."""

    def __init__(self, config: RunConfig, place: int, user_path: str | None) -> None:
        super().__init__(config, place, user_path, threads=config.collector.threads)
        self._scorer = ray_scorer(config, taggers={})
        self._model = collector_model(config, place)

    async def connect(self, transports: Transports) -> None:
        """Attach to the data plane. Weights come by Ray's object store, whatever way those of a publish take."""
        self._served = build_evaluator(
            self._config,
            model=self._model,
            scorer=self._scorer,
            plane=await self._plane(),
            transport=RayObjectStore(),
            blocking=in_thread,
        )


class RankActor(_ActorProcess):
    def __init__(self, config: RunConfig, index: int, user_path: str | None) -> None:
        super().__init__(config, index, user_path, threads=config.trainer.threads)
        # Where NVIDIA MPS serves a GPU to several processes, a collector's short kernels go before a rank's long ones.
        # CUDA reads it when it starts, with the model.
        os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
        self._model = rank_model(config, index)
        self._device = rank_device(config, index)

    async def connect(self, meeting: str, transports: Transports) -> None:
        """Attach to the data plane and meet the other ranks at the address `meeting`."""
        listen_at(ray.util.get_node_ip_address())
        trainer = self._config.trainer
        nccl, blocking = _has_own_gpu(self._device, trainer.ranks), on_device(in_thread, self._device)
        links = await meet(trainer, self._index, meeting=meeting, nccl=nccl, blocking=in_thread)
        if trainer.is_sharded:
            links = replace(links, shards=_shards(trainer, self._device, nccl=nccl))
        plane = await self._plane()
        self._served = build_rank(
            self._config,
            self._index,
            model=self._model,
            plane=plane,
            links=links,
            transport=transports.build(f"rank{self._index}", self._device, blocking=blocking),
            blocking=blocking,
            extras=extras_of(await plane.partition(PARTITION)),
        )
        self._model = None  # The backend has what it needs of it.
