"""The Ray actors: thin processes around a Collector or a TrainerRank.

Each is built in two steps: the constructor loads the model while TransferQueue starts, and `connect` attaches to the
data plane. Blocking work runs in threads, so that the event loop stays free.
"""

import os
import pickle
import sys
from typing import Any

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.lifecycle.evaluation import build_evaluator
from asyncrl.engine.lifecycle.parts import (
    all_taggers,
    build_collector,
    build_rank,
    collector_model,
    rank_model,
)
from asyncrl.engine.lifecycle.scorers import ray_scorer
from asyncrl.engine.lifecycle.transports import Transports
from asyncrl.engine.model.device import choose_device
from asyncrl.engine.weights.ray_store import RayObjectStore
from asyncrl.trainers.extras import extras_of
from asyncrl.trainers.reducer import Alone, Gloo, Reducer


class _ActorProcess:
    """Calls methods of the collector or rank in it. `user_path` goes last on the path, for the user's modules."""

    def __init__(self, config: RunConfig, index: int, user_path: str, *, threads: int) -> None:
        torch.set_num_threads(threads)
        if user_path not in sys.path:
            sys.path.append(user_path)
        self._config = config
        self._index = index
        self._served: Any = None

    async def _plane(self) -> TransferQueuePlane:
        plane = self._config.data_plane
        return await TransferQueuePlane.attach(
            deadline_s=plane.deadline_s, start_s=self._config.supervision.start_timeout_s
        )

    async def pid(self) -> int:
        return os.getpid()

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the collector or rank."""
        return await getattr(self._served, method)(*args, **kwargs)


def _has_own_gpu(model: Any, ranks: int) -> bool:
    """Return whether each rank has a GPU of its own; ranks take GPUs in turn."""
    return next(model.parameters()).device.type == "cuda" and torch.cuda.device_count() >= ranks


def _nccl_on_loopback() -> None:
    """Have NCCL meet as gloo does: on this host, and nothing listens beyond it."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class CollectorActor(_ActorProcess):
    """`pickled_taggers` are those of filters that are not in the configuration, by tag.

    They come as bytes, because they can be read only once the user's modules can be imported.
    """

    def __init__(self, config: RunConfig, index: int, user_path: str, pickled_taggers: bytes) -> None:
        super().__init__(config, index, user_path, threads=config.collector.threads)
        self._taggers = all_taggers(config, pickle.loads(pickled_taggers))
        # Its processes start while the model loads.
        self._scorer = ray_scorer(config, taggers=self._taggers)
        self._model = collector_model(config, config.trainer.ranks + index)

    async def connect(self, transports: Transports) -> None:
        """Attach to the data plane; weights come as `transports` says."""
        device = choose_device(self._config.collector.device, self._config.trainer.ranks + self._index)
        _nccl_on_loopback()
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

    def __init__(self, config: RunConfig, place: int, user_path: str) -> None:
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
    def __init__(self, config: RunConfig, index: int, user_path: str) -> None:
        super().__init__(config, index, user_path, threads=config.trainer.threads)
        self._model = rank_model(config, index)

    async def connect(self, meeting: str, transports: Transports) -> None:
        """Attach to the data plane and meet the other ranks at the address `meeting`."""
        _nccl_on_loopback()
        reducer: Reducer = Alone()
        if self._config.trainer.ranks > 1:
            nccl = _has_own_gpu(self._model, self._config.trainer.ranks)
            reducer = gloo = Gloo(
                rank=self._index,
                ranks=self._config.trainer.ranks,
                meeting=meeting,
                timeout_s=self._config.trainer.step_timeout_s,
                blocking=in_thread,
                nccl=nccl,
            )
            await gloo.join()
        plane = await self._plane()
        self._served = build_rank(
            self._config,
            self._index,
            model=self._model,
            plane=plane,
            reducer=reducer,
            transport=transports.build(f"rank{self._index}", next(self._model.parameters()).device, blocking=in_thread),
            blocking=in_thread,
            extras=extras_of(await plane.partition(PARTITION)),
        )
