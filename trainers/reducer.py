"""Sums over data-parallel ranks: gloo between processes, a meeting point within one."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import anyio
import torch
import torch.distributed as dist

from asyncrl.engine.errors import Overdue
from asyncrl.engine.offload import Offload


class Reducer(Protocol):
    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over all ranks; every rank must call, in the same order."""


class Alone:
    """The only rank."""

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Gloo:
    """torch.distributed's process group, joined over a file that all ranks of this host see.

    With `nccl` tensors of a GPU are summed by NCCL, which needs a GPU for each rank; gloo sums the others.
    """

    def __init__(
        self, *, rank: int, ranks: int, store: str, timeout_s: float, offload: Offload[Any], nccl: bool = False
    ) -> None:
        self._offload = offload
        self._join: Callable[[], None] = lambda: dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )

    async def join(self) -> None:
        """Meet the other ranks; once, before the first sum."""
        await self._offload(self._join)

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        await self._offload(lambda: dist.all_reduce(values))
        return values


class Meeting:
    """Where the ranks of one process meet: the last to come adds up, in rank order."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._parts: dict[int, torch.Tensor] = {}
        self._total = torch.zeros(0)
        self._done = anyio.Event()

    def member(self, rank: int) -> Reducer:
        return _Member(self, rank)

    async def meet(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = values
        done = self._done
        if len(self._parts) == self._ranks:
            self._total = torch.stack([self._parts[r] for r in range(self._ranks)]).sum(0)
            self._parts = {}
            self._done = anyio.Event()
            done.set()
        try:
            with anyio.fail_after(self._timeout_s):
                await done.wait()
        except TimeoutError:
            raise Overdue(f"rank {rank} waited {self._timeout_s:g} s for the other ranks") from None
        return self._total.clone()


class _Member:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        return await self._meeting.meet(self._rank, values)
