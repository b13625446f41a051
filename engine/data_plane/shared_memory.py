"""Payloads in shared memory: one file per row, mapped by the readers of this host without a copy.

Invariant: the directory lives as long as its owner. It goes with an orderly close; what a killed
owner left goes with the next start, which finds that nobody holds the directory's lock.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from asyncrl.engine.errors import DataPlaneError, MissingRows, StoreFull

_PREFIX = "asyncrl-"
_LOCK = "lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_USUAL = Path("/dev/shm")
_ENOUGH_BYTES = 1 << 30


def shared_directory(option: str | None, *, usual: Path = _USUAL) -> Path | None:
    """Return the directory for `data_plane.shared_memory`; None for `auto` if there is too little room."""
    if option != "auto":
        return None if option is None else Path(option)
    if not usual.is_dir():
        return None
    # Before looking for room, because the remains of killed runs may take it.
    _sweep(usual)
    return usual if shutil.disk_usage(usual).free >= _ENOUGH_BYTES else None


class SharedMemory:
    """A directory of payloads. Build it with `create`, as its owner, or `open`."""

    def __init__(self, path: Path, lock: int | None = None, capacity_rows: int | None = None) -> None:
        self.path = path
        self._lock = lock
        self._capacity_rows = capacity_rows

    @classmethod
    def create(cls, parent: Path, capacity_rows: int | None = None) -> "SharedMemory":
        """Make a directory of one's own in `parent`, and remove those of owners that were killed.

        `capacity_rows` refuses puts beyond it. DataPlaneError if `parent` cannot be written to.
        """
        try:
            _sweep(parent)
            # Locked before it has the name that others sweep.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
            lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = hidden.rename(parent / hidden.name[1:])
        except OSError as error:
            raise DataPlaneError(f"no shared memory in {parent}: {error}; see data_plane.shared_memory") from error
        return cls(path, lock, capacity_rows)

    @classmethod
    def open(cls, path: Path, capacity_rows: int | None = None) -> "SharedMemory":
        """Use the directory of another process of this host; DataPlaneError on any other host."""
        if not (path / _LOCK).exists():
            raise DataPlaneError(
                f"the run's shared memory {path} is not on this host; processes on several hosts need "
                "data_plane.shared_memory: null, so that TransferQueue's storage carries the payloads"
            )
        return cls(path, None, capacity_rows)

    def write(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        """Write the bytes of `parts` one after the other; StoreFull, and nothing stays, without room."""
        file = self._file(name)
        if self._capacity_rows is not None and len(os.listdir(self.path)) - 1 >= self._capacity_rows:
            raise StoreFull(f"the store holds its {self._capacity_rows} rows")
        try:
            with file.open("xb") as out:
                out.writelines(part.numpy().data for part in parts if part.numel())
        except OSError as error:
            self.remove([name])
            if error.errno not in _FULL:
                raise DataPlaneError(f"could not write to shared memory: {error}") from error
            free = shutil.disk_usage(self.path.parent).free >> 20
            raise StoreFull(
                f"shared memory {self.path.parent} has {free} MiB free; enlarge it, "
                "or set data_plane.shared_memory to another directory, or to null"
            ) from error

    def map(self, name: str) -> torch.Tensor:
        """Map a payload, uint8 (bytes,), without a copy.

        The mapping is private: what a reader writes into it stays with that reader. It outlives `remove`: the
        kernel keeps the pages of a file without a name while anybody maps them, so a view never reads another's row.
        """
        try:
            file = self._file(name)
            return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        except (FileNotFoundError, RuntimeError) as error:
            raise MissingRows(f"a row was cleared while it was read: {error}") from error

    def has(self, name: str) -> bool:
        """Return whether there is a payload of this name."""
        return self._file(name).exists()

    def remove(self, names: Sequence[str]) -> None:
        """Remove payloads; those that are gone already are ignored."""
        for name in names:
            self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        # Names come out of tags that another writer may have put: one must not lead out of the directory.
        if name in ("", "..", _LOCK) or Path(name).name != name:
            raise DataPlaneError(f"{name!r} cannot be a payload in {self.path}")
        return self.path / name

    def close(self) -> None:
        """Remove the directory, if it is one's own; idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep(parent: Path) -> None:
    """Remove directories whose owner is gone: the kernel lets go of a dead process's lock."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            held = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)
