"""The process of one rank: calls a Megatron backend as it is told by pickles on its standard input.

`python rank_process.py RANK RANKS ADDRESS [cuda]`; with `cuda` each rank has a GPU. A request is a method and its
arguments, an answer what it returned, in the host's memory, or the error that it raised.
"""

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # Where torch's own types find it.

from asyncrl.engine.errors import AsyncRLError
from asyncrl.trainers.backends.megatron.backend import MegatronBackend
from asyncrl.trainers.backends.megatron.settings import MegatronSettings, Split
from asyncrl.trainers.rank_state.keeper import StateKeeper


class Rank:
    """What a test can call: a method of the backend, or one of these."""

    def __init__(self, join: Callable[[], None], device: torch.device) -> None:
        self.backend: Any = None
        self._join = join
        self._device = device
        self._split: Split | None = None

    def build(
        self,
        config: Any,
        weights: dict[str, torch.Tensor],
        settings: MegatronSettings,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backend = None
        if self._split != settings.split:  # Else each test would leave its groups' threads behind.
            if self._split is not None:
                from megatron.core import parallel_state

                parallel_state.destroy_model_parallel()
                gc.collect()  # The backend before it holds groups too.
                dist.destroy_process_group()
            self._join()
            self._split = settings.split
        self.backend = MegatronBackend(config, weights, settings, pad_id=0, device=self._device, dtype=dtype)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in self.backend.state().items()}

    def save(self, folder: str) -> None:
        keeper = StateKeeper(dist.get_rank(), dist.get_world_size())
        keeper.hold(self.backend, 1)
        keeper.save(Path(folder))

    def load(self, folder: str) -> None:
        StateKeeper(dist.get_rank(), dist.get_world_size()).load(Path(folder), self.backend)


def main(rank: int, ranks: int, address: str, device: str = "cpu") -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever megatron prints goes elsewhere.
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=100)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    times = count()

    def join() -> None:
        own_store = PrefixStore(str(next(times)), store)
        # On GPUs as a run's ranks do.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=own_store, rank=rank, world_size=ranks, timeout=timeout)

    own = Rank(join, torch.device("cuda", rank) if on_gpu else torch.device("cpu"))
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = getattr(own if hasattr(own, method) else own.backend, method)(*arguments[0], **arguments[1])
        except (AsyncRLError, FloatingPointError) as error:  # The test raises it.
            answer = error
        except Exception:  # Its type may be one that the test's process cannot import.
            answer = RuntimeError(traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
