"""A process group of one sender and its receivers, beside whatever groups their processes have already."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # Where torch's own types find them.

Backend = Literal["nccl", "gloo"]

_CHUNK_BYTES = 256 * 2**20
"""So much goes in one collective."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class ProcessGroup:
    """Member `place` of `size`, of which 0 sends; all meet at the address `meeting` under the name `session`.

    Every call ends within about `timeout_s`, with RuntimeError if the others did not do their part.
    """

    def __init__(self, meeting: str, session: str, *, place: int, size: int, backend: Backend, timeout_s: float):
        host, _, port = meeting.rpartition(":")
        timeout = timedelta(seconds=timeout_s)
        # A client of one's own: a call that waits would keep others of the same client waiting.
        client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(session, client)
        # NCCL waits without limit for members that do not come; here the wait has one.
        store.set(f"here/{place}", "yes")
        store.wait([f"here/{member}" for member in range(size)], timeout)
        self._timeout = timeout
        self._group = _nccl(store, place, size, timeout) if backend == "nccl" else _gloo(store, place, size, timeout)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill every member's `flat` with the sender's, uint8 (bytes,), and return when it is there."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        works = [
            self._group.broadcast([flat[start : start + _CHUNK_BYTES]], options)
            for start in range(0, flat.numel(), _CHUNK_BYTES)
        ]
        for work in works:
            work.wait(self._timeout)
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def abort(self) -> None:
        """End what hangs in the group; it cannot be used afterwards."""
        self._group.abort()


def _gloo(store: Any, place: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, place, size, timeout)


def _nccl(store: Any, place: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _no_teardown():
        return dist.ProcessGroupNCCL(store, place, size, options)


@contextmanager
def _no_teardown() -> Iterator[None]:
    """Have torch leave errors of a group that is made here to us: by default it ends the process for them."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before
