"""What `auto` means to Ray on this host, found as Ray does, without importing it: that would come too early."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FLAG = b"--gcs-address="


@dataclass(frozen=True, slots=True)
class FoundRay:
    """The addresses of clusters with a process here, and that of the last `ray start`, which may have ended."""

    running: frozenset[str]
    last: str | None


def find_ray(proc: Path = _PROC, folder: Path | None = None) -> FoundRay:
    """Look for the Ray that `auto` joins. `folder` is that of Ray's own files, by default where Ray has them."""
    told = os.environ.get("RAY_ADDRESS")
    if told and told != "auto":
        # It wins over `auto`, in Ray too.
        return FoundRay(frozenset(), told)
    if folder is None:
        folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"
    last = ""
    with suppress(OSError, UnicodeDecodeError):
        last = (folder / "ray_current_cluster").read_text(encoding="utf-8").strip()
    return FoundRay(frozenset(_running(proc)), last or None)


def _running(proc: Path) -> Iterator[str]:
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            first, *words = (process / "cmdline").read_bytes().split(b"\0")
            if b"raylet" in first.rpartition(b"/")[2]:
                yield from (word.removeprefix(_FLAG).decode() for word in words if word.startswith(_FLAG))
