"""Ranks that hold parts of one replica (tensor, context, pipeline) and so need the same rows.

Invariant: index 0 leads; it alone writes columns back, whoever fetches.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from asyncrl.engine.aio.blocking import Blocking


class Siblings(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Fill `values` with the leader's, of the same shape and dtype; all siblings call, in the same order."""


class OnlyChild:
    """A rank with a whole replica; it leads itself."""

    index = 0
    count = 1

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values


class GlooSiblings:
    """A gloo group of its own, so that reads ahead never meet the reducer's sums. Tensors are on the CPU.

    `ranks` are the siblings' numbers in the process group that has been joined; each of them makes this object.
    """

    def __init__(self, ranks: list[int], *, timeout_s: float, blocking: Blocking[Any]) -> None:
        self._blocking = blocking
        self._leader = ranks[0]
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        self.count = len(ranks)
        self.index = ranks.index(dist.get_rank())

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        await self._blocking(lambda: dist.broadcast(values, src=self._leader, group=self._group))
        return values
