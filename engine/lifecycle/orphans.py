"""What a driver that was killed has left running: Ray's agents, and actors that were suspended or hang.

All processes of a run inherit a mark that names its driver. Whoever starts a run on this host ends those whose driver
is gone. Most end by themselves within seconds, Ray's agents within a minute, and what is suspended never does.

Invariant: a process is ended only if it carries a mark, of a process that no longer runs, and is one of Ray's or
asyncrl's. What a user started beside a run may carry the mark too, and is left alone.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

MARK = "ASYNCRL_DRIVER"
_PROC = Path("/proc")
_OURS = (b"-packages/ray/", b"asyncrl.collectors.score_worker", b"/mooncake_master")
"""What stands in the command line of a process that a run starts. In Ray's own images everything is below /home/ray."""


def mark() -> str:
    """Return the mark of a run that this process drives; empty where nothing tells a process by (Linux does).

    Process ids are used again, and each container counts its own: the start in ticks since boot, and the container,
    tell two processes of one id apart. The wall clock, which may be set, has no part in it.
    """
    with suppress(OSError):
        return f"{os.readlink(_PROC / 'self/ns/pid')} {os.getpid()} {start_ticks(os.getpid())}"
    return ""


def end_orphans() -> list[int]:
    """Kill what the drivers of other runs, which were killed, have left on this host; return the process ids."""
    ended = []
    with suppress(OSError):
        place = os.readlink(_PROC / "self/ns/pid")
        for pid, marked in _marked():
            where, _, driver = marked.partition(" ")
            if where == place and not _runs(driver) and _is_ours(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    ended.append(pid)
    return ended


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes of this user that carry a mark, and the mark."""
    name = f"{MARK}=".encode()
    for folder in _PROC.iterdir():
        # A process may end while it is looked at.
        with suppress(OSError):
            if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
                for variable in (folder / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(name):
                        yield int(folder.name), variable[len(name) :].decode(errors="replace")


def _runs(driver: str) -> bool:
    pid, _, ticks = driver.partition(" ")
    with suppress(OSError):
        return start_ticks(int(pid)) == ticks
    return False


def _is_ours(pid: int) -> bool:
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes()
        return words.startswith(b"ray::") or any(word in words for word in (*_OURS, _ray_folder()))
    return False


def _ray_folder() -> bytes:
    """Return where the Ray of this Python is, without importing it."""
    found = find_spec("ray")
    assert found is not None, "asyncrl needs Ray"
    return os.fsencode(f"{os.path.dirname(str(found.origin))}{os.sep}")


def start_ticks(pid: int) -> str:
    """Return when a process started, in ticks since boot; ProcessLookupError if only its remains are there."""
    stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    # From the third field on: the second, the name, may hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return fields[19]
