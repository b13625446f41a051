"""What a run changes in its process, and gives back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_one_run = threading.Lock()


@contextmanager
def only_run() -> Iterator[None]:
    """Refuse a second run beside this one: RuntimeError. Logs, signals and torch's threads are the process's."""
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("a run is under way in this process; wait for its end, or start a process for the other")
    try:
        yield
    finally:
        _one_run.release()


@contextmanager
def torch_threads_restored() -> Iterator[None]:
    """Give back the number of threads that torch computes with."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
