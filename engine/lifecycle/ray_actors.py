"""The Ray actors: thin processes around a Collector or a TrainerRank.

Each is built in two strokes: the constructor loads the model while TransferQueue starts beside
it, `connect` attaches to the data plane. The event loop stays free: blocking work runs in threads.
"""

import os
import sys
from typing import Any

import torch

from asyncrl.configs import RunConfig
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.lifecycle.parts import build_collector, build_rank, build_run_model
from asyncrl.engine.offload import in_thread
from asyncrl.engine.weights.ray_store import RayObjectStore
from asyncrl.trainers.reducer import Alone, Gloo, Reducer


class _RemoteActor:
    """Calls methods of what it holds; `user_path` makes the user's own modules importable, last."""

    def __init__(self, config: RunConfig, index: int, user_path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        if user_path not in sys.path:
            sys.path.append(user_path)
        self._config = config
        self._index = index
        self._model = build_run_model(config)
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


class CollectorActor(_RemoteActor):
    def __init__(self, config: RunConfig, index: int, user_path: str) -> None:
        super().__init__(config, index, user_path, config.collector.threads)

    async def connect(self) -> None:
        self._served = build_collector(
            self._config,
            self._index,
            model=self._model,
            plane=await self._plane(),
            transport=RayObjectStore(),
            offload=in_thread,
        )


class RankActor(_RemoteActor):
    def __init__(self, config: RunConfig, index: int, user_path: str) -> None:
        super().__init__(config, index, user_path, config.trainer.threads)

    async def connect(self, store: str) -> None:
        """Attach to the data plane and meet the other ranks at the file `store`."""
        reducer: Reducer = Alone()
        if self._config.trainer.ranks > 1:
            reducer = gloo = Gloo(
                rank=self._index,
                ranks=self._config.trainer.ranks,
                store=store,
                timeout_s=self._config.trainer.step_timeout_s,
                offload=in_thread,
            )
            await gloo.join()
        self._served = build_rank(
            self._config,
            self._index,
            model=self._model,
            plane=await self._plane(),
            reducer=reducer,
            transport=RayObjectStore(),
            offload=in_thread,
        )
