"""One writer a log: a lock beside it, which the kernel gives back when its process ends, however it ends.

Invariant: of all processes of a host, and of several on a file system that shares its locks, one at
most holds the lock of a log. Readers do not ask for it.
"""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from asyncrl.engine.errors import TraceError

log = structlog.get_logger()

# A file system without locks, such as some that are mounted over a network.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class LogLock:
    """The right to write the log whose growing file is `growing`; TraceError if another writer has it.

    The file `events.lock` says who has it, for the one who asks next. One that a dead process left
    locks nothing.
    """

    def __init__(self, growing: Path) -> None:
        self._growing = growing
        self._path = growing.with_suffix(".lock")
        self._file = self._acquire()
        # The holder before may have let go, and removed its file, after it was opened here and before it was locked.
        while not self._is_there():
            self._file.close()
            self._file = self._acquire()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def release(self) -> None:
        """Let another writer have the log; a second time changes nothing."""
        if not self._file.closed:
            with suppress(OSError):  # A disk that takes nothing more; the lock itself goes with the file's end.
                self._path.unlink()
            with suppress(OSError):
                self._file.close()

    def _acquire(self) -> IO[bytes]:
        file = self._path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            # It may not have come to writing who it is.
            holder = file.read().decode(errors="replace") or "another process"
            file.close()
            raise TraceError(
                f"the event log in {self._growing.parent} is being written by {holder}; a log has one writer. "
                "Wait for that process or end it, or name another folder (run.directory, --run-dir)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            log.warning("nothing keeps a second writer from this log", path=str(self._growing), error=str(error))
        return file

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
