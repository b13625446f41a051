"""One writer per log: a lock beside it, which the kernel releases when its process ends, however it ends.

Invariant: at most one process holds the lock of a log, among the processes of one host and of other hosts if the file
system shares its locks. Readers need no lock.
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

# Errors of a file system without locks, such as some network file systems.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class LogLock:
    """The right to write the log whose growing file is `growing`; TraceError if another writer has it.

    The file `events.lock` names its owner, for the error of the next one. The file alone locks nothing, so one that
    a dead process left does no harm.
    """

    def __init__(self, growing: Path) -> None:
        self._growing = growing
        self._path = growing.with_suffix(".lock")
        self._file = self._acquire()
        # The owner before may have removed the file after it was opened here and before it was locked. This lock would
        # then be on a file that nobody else sees, and a second writer would get one of its own.
        while not self._is_there():
            self._file.close()
            self._file = self._acquire()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            with suppress(OSError):  # On a full disk; closing the file releases the lock.
                self._path.unlink()
            with suppress(OSError):
                self._file.close()

    def _acquire(self) -> IO[bytes]:
        file = self._path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            # Its owner may not have written its name yet.
            holder = file.read().decode(errors="replace") or "another process"
            file.close()
            raise TraceError(
                f"the event log in {self._growing.parent} is being written by {holder}; a log has one writer. "
                "Wait for that process, end it, or choose another folder (run.directory, --run-dir)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            log.warning(
                "the file system has no locks, so a second writer of this log would go unnoticed",
                path=str(self._growing),
                error=str(error),
            )
        return file

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
