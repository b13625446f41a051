"""The process of an actor, on whatever node of the cluster it runs, and how it is ended.

A process id means nothing on another node: there the process is ended by a task that runs beside it.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.engine.lifecycle.family import end_family
from asyncrl.engine.lifecycle.orphans import start_ticks

_END_S = 20.0
"""Longest wait for another node to end a process; one that is lost has ended it."""


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process on the node with Ray's id `node`; `ticks`, its start, tells it from a later one with its number."""

    node: str
    pid: int
    ticks: str

    @classmethod
    def own(cls) -> "RayProcess":
        """Return the process that asks."""
        pid, ticks = psutil.Process().pid, ""
        with suppress(OSError):  # Not on Linux, where a cluster has one node.
            ticks = start_ticks(pid)
        return cls(ray.get_runtime_context().get_node_id(), pid, ticks)

    def kill(self) -> None:
        """Kill it without waiting if it is on this node; on others Ray's raylet does."""
        if self._is_here() and (process := self._found()) is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def end(self) -> None:
        """Kill it with all that it started, and return when they are gone, or their node is."""
        if self._is_here():
            await anyio.to_thread.run_sync(partial(_end, self))
            return
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(_end).options(scheduling_strategy=there)
        with anyio.move_on_after(_END_S), suppress(ray.exceptions.RayError):
            await task.remote(self)

    def _is_here(self) -> bool:
        return bool(ray.get_runtime_context().get_node_id() == self.node)

    def _found(self) -> psutil.Process | None:
        """Return the process; None if it is gone, also if another one has its number."""
        with suppress(psutil.NoSuchProcess, OSError):
            process = psutil.Process(self.pid)
            if not self.ticks or start_ticks(self.pid) == self.ticks:
                return process
        return None


def _end(process: RayProcess) -> None:
    end_family(process.pid, process._found())
