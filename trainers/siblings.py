"""Ranks that hold parts of one replica (tensor, context, pipeline) and so need the same rows.

For backends whose ranks share samples (Megatron); runs use only `OnlyChild` yet.
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

    `ranks` are the siblings' numbers in the process group that has been joined. Every process of that
    group makes all sibling groups, in the same order.
    """

    def __init__(self, ranks: list[int], *, timeout_s: float, blocking: Blocking[Any]) -> None:
        self._blocking = blocking
        self._leader = ranks[0]
        self._group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self.count = len(ranks)
        self.index = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1

    async def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        await self._blocking(lambda: dist.broadcast(values, src=self._leader, group=self._group))
        return values
