"""Shelves: the shared memory of each node that has ranks, in a run on several nodes.

A shelf is an actor on its node. It owns the directory in which the processes there put and map rows, and reads and
removes rows for those elsewhere. Nodes are named by address.

Invariant: a directory lives as long as its shelf, and a shelf no longer than the plane of the driver.
"""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch

from asyncrl.engine.data_plane.shared_memory import SharedMemory, shared_directory
from asyncrl.engine.errors import DataPlaneDown, DataPlaneError

_CLOSE_S = 5.0


class OnNodes(NamedTuple):
    """Nodes that get a shelf, by address with Ray's id, and `data_plane.shared_memory`, which holds on each."""

    nodes: Mapping[str, str]
    option: str | None


class ShelfActor:
    """One node's. `option` is `data_plane.shared_memory`."""

    def __init__(self, option: str | None) -> None:
        parent = shared_directory(option)
        self._memory = None if parent is None else SharedMemory.create(parent)

    def path(self) -> str | None:
        """Return the directory; None on a node that has too little shared memory."""
        return None if self._memory is None else str(self._memory.path)

    def read(self, puts: Sequence[str]) -> list[Any]:
        """Return the bytes of rows, as arrays that Ray carries without pickling them."""
        assert self._memory is not None
        return [self._memory.map(put).numpy() for put in puts]

    def remove(self, puts: Sequence[str]) -> None:
        assert self._memory is not None
        self._memory.remove(puts)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


class Shelves:
    """Those of a run, for a process on the node with address `here`; `paths` are their directories by node.

    `id` tells them from those of an attempt before, which may be about to end.
    """

    def __init__(self, paths: Mapping[str, str], here: str, id: str = "") -> None:
        self.here = here
        self.paths = paths
        self.id = id
        self._actors: dict[str, Any] = {}

    @classmethod
    async def start(cls, where: OnNodes, here: str) -> "Shelves":
        """Start a shelf on each node; none where there is no room for shared memory.

        Cancelled, or with an error, it leaves actors that end with the run.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        shelves = cls({}, here, uuid.uuid4().hex[:12])
        actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(ShelfActor)
        for address, node in where.nodes.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            shelves._actors[address] = actor.options(name=shelves._name(address), scheduling_strategy=there).remote(
                where.option
            )
        shelves.paths = {
            address: path for address, one in shelves._actors.items() if (path := await one.path.remote()) is not None
        }
        return shelves

    def memory(self) -> SharedMemory | None:
        """Open the shared memory of this node, if it has a shelf."""
        return SharedMemory.open(Path(self.paths[self.here])) if self.here in self.paths else None

    def pings(self) -> list[Any]:
        """Return calls that fail once a shelf is dead."""
        return [actor.path.remote for actor in self._actors.values()]

    async def read(self, node: str, puts: Sequence[str]) -> list[torch.Tensor]:
        """Return the bytes of rows that are on the shelf of a node."""
        # Ray's arrays are read only, and belong to its object store.
        return [torch.from_numpy(array.copy()) for array in await self._call(node, "read", puts)]

    async def remove(self, node: str, puts: Sequence[str]) -> None:
        await self._call(node, "remove", puts)

    async def close(self) -> None:
        """End those that were started here."""
        import ray

        with anyio.move_on_after(_CLOSE_S):
            for actor in self._actors.values():
                with suppress(ray.exceptions.RayError):  # Its node may be gone, with all that was there.
                    await actor.close.remote()
        for actor in self._actors.values():
            ray.kill(actor)

    async def _call(self, node: str, method: str, puts: Sequence[str]) -> Any:
        import ray

        try:
            return await getattr(self._actor(node), method).remote(list(puts))
        except ray.exceptions.RayActorError as error:
            raise DataPlaneDown(f"the shared memory of {node} is gone with its process: {error}") from error

    def _actor(self, node: str) -> Any:
        import ray

        if node not in self.paths:
            raise DataPlaneError(f"a row is said to be in the shared memory of {node}, which has none of this run")
        if node not in self._actors:
            self._actors[node] = ray.get_actor(self._name(node), namespace=ray.get_runtime_context().namespace)
        return self._actors[node]

    def _name(self, address: str) -> str:
        return f"asyncrl-shelf-{self.id}-{address}"
