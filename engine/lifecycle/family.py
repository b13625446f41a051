"""An actor's process with all that it started, and how they are ended.

What a killed process started lives on without a parent, such as the process of an inference engine with a GPU's memory.
It is known by a mark in its environment, which whatever is started inherits.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

import psutil

_MARK = "ASYNCRL_ACTOR_PID"
_END_S = 10.0


def mark_family() -> None:
    """Mark all that this process starts from here on as its family."""
    os.environ[_MARK] = str(os.getpid())


def end_family(pid: int, process: psutil.Process | None) -> None:
    """Kill the process that had the number `pid`, None if it is gone, and its family; waits ten seconds at most."""
    mark = str(pid)
    ended = [] if process is None else [process]
    _kill(ended)
    family = [one for one in psutil.process_iter() if one.pid != os.getpid() and _mark_of(one) == mark]
    _kill(family)
    psutil.wait_procs([*ended, *family], timeout=_END_S)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _mark_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(_MARK, "")
    except (psutil.Error, OSError):  # Gone, or another user's.
        return ""
