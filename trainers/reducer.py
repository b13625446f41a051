"""Sums over replicas: by gloo between processes, by a `Meeting` within one."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import anyio
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # Where torch's own types find it; `dist` does not export it to them.

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.errors import Overdue


class Reducer(Protocol):
    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over the ranks with this part of a replica; all call, in the same order."""


class Alone:
    """The only rank."""

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class MeetingPoint:
    """Where the processes of ranks find each other: a store that listens at `host` as long as this object lives.

    Unlike a file it leaves nothing behind if a process is killed.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Bound to a free port here, because torch would listen on every interface.
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.address = f"{host}:{port}"


class Gloo:
    """torch.distributed's process group; its processes find each other at the address of a MeetingPoint.

    With `nccl`, NCCL sums the tensors on GPUs (it needs one GPU per rank), and gloo sums the others. Sums are over
    `peers`, this rank among them; None: over all ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        meeting: str,
        timeout_s: float,
        blocking: Blocking[Any],
        nccl: bool = False,
        peers: Sequence[int] | None = None,
    ) -> None:
        self._blocking = blocking
        self._rank, self._ranks = rank, ranks
        self._meeting = meeting
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        self._peers = list(peers or range(ranks))
        self._group: Any = None  # All ranks.

    async def join(self) -> None:
        """Meet the other ranks; once, before the first sum."""
        await self._blocking(self._join)

    def leave(self) -> None:
        """Give up the process group, with every group made from it, so that another may be joined."""
        dist.destroy_process_group()

    def _join(self) -> None:
        host, _, port = self._meeting.rpartition(":")
        dist.init_process_group(
            self._backend,
            store=TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout),
            rank=self._rank,
            world_size=self._ranks,
            timeout=self._timeout,
        )
        if len(self._peers) < self._ranks:
            self._group = dist.new_group(self._peers, timeout=self._timeout, use_local_synchronization=True)

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        await self._blocking(lambda: dist.all_reduce(values, group=self._group))
        return values


class Meeting:
    """Sums over the ranks of one process: the last rank to come adds up, in rank order."""

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
