"""The processes of a run, seen from outside: Ray writes an actor's class into its command line."""

from collections.abc import Sequence
from contextlib import suppress

import psutil

from kit.plan import Part

_WORDS: dict[Part, str] = {
    "collector": "ray::CollectorActor",
    "rank": "ray::RankActor",
    "controller": "ray::TransferQueueController",
    "storage": "ray::SimpleStorageUnit",
    "score": "score_worker import serve",
}


def tree(pid: int) -> list[psutil.Process]:
    """Return all that a process has started and that lives."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def of_part(part: Part, pid: int) -> list[psutil.Process]:
    """Return the processes of a part of the run whose driver is `pid`, oldest first."""
    if part == "driver":
        return [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    found = []
    for process in tree(pid):
        with suppress(psutil.Error):
            if _WORDS[part] in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found, key=lambda one: one[:2])]


def lives(process: psutil.Process) -> bool:
    """Return whether a process is there, and not only its remains."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
