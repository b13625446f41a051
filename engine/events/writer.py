"""Writes events to files: in the caller's thread, or in a thread of its own, off the critical path.

Invariant: lines are in the order of `write`; after `close` all of them are on disk.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.reopen import Tail
from asyncrl.engine.events.segments import Finisher
from asyncrl.engine.events.types import AnyEvent, Checkpointed, encoded

SEGMENT_BYTES = 64 << 20
_WRITE_EVERY_S = 0.2
_MAX_PENDING = 100_000
_CHUNK = 4096


class Writer(Protocol):
    def write(self, event: AnyEvent) -> None: ...

    def wait_written(self, timeout_s: float) -> bool: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class FileWriter:
    """Writes lines in the caller's thread, after the `tail` of an existing log.

    A file of `segment_bytes` or more is finished and given to `compress`. A checkpoint syncs the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        tail: Tail | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        compress: Callable[[Finisher, Path], None] = Finisher.compress,
    ) -> None:
        tail = tail or Tail()
        self._path = path
        self._segment_bytes = segment_bytes
        self._compress = compress
        self._finisher = Finisher(path, tail.segments)
        self._file: IO[bytes] | None = path.open("ab")
        self._bytes = tail.bytes
        self._first = tail.first
        for segment in tail.segments:
            if not segment.file.endswith(".gz"):
                compress(self._finisher, path.with_name(segment.file))

    def write(self, event: AnyEvent) -> None:
        self.write_many((event,))

    def wait_written(self, timeout_s: float) -> bool:
        """Put on disk what was written."""
        self._sync()
        return True

    def write_many(self, events: Sequence[AnyEvent]) -> None:
        """Write events with one call to the file; a segment may end at any of them."""
        lines: list[bytes] = []
        size = self._bytes
        first = self._first
        for event in events:
            first = first or event.seq
            line = encoded(event)
            lines.append(line)
            size += len(line) + 1
            if size >= self._segment_bytes:
                self._put(lines)
                self._finish(first, event.seq)
                lines, size, first = [], 0, 0
        self._put(lines)
        self._bytes, self._first = size, first
        if any(type(event) is Checkpointed for event in events):
            self._sync()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file = self._file
            try:
                self._sync()
            finally:
                self._file = None
                file.close()

    def _put(self, lines: Sequence[bytes]) -> None:
        if lines:
            if self._file is None:
                raise ValueError(f"{self._path} is closed")
            self._file.write(b"\n".join(lines) + b"\n")

    def _finish(self, first: int, last: int) -> None:
        self._sync()
        assert self._file is not None
        self._file.close()
        self._compress(self._finisher, self._finisher.rename(first, last))
        self._file = self._path.open("wb")

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())


class ThreadedWriter:
    """Encodes and writes in one thread and compresses in another; the caller only appends to a list.

    Events are in the file 0.2 s later. The thread looks for them by itself: if each step woke it, the caller would
    wait for it on busy cores. An error of the thread is raised by the caller's next call. `cpu_s` is the CPU time of
    both threads.
    """

    def __init__(self, path: Path, *, tail: Tail | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._path = path
        self._pending: deque[AnyEvent] = deque()
        self._wake = threading.Condition()
        self._closing = self._awaited = False
        self._error: BaseException | None = None
        self._compressing: list[threading.Thread] = []
        self.cpu_s = 0.0
        self._writer = FileWriter(path, tail=tail, segment_bytes=segment_bytes, compress=self._start_compressing)
        self._thread = threading.Thread(target=self._run, name="event-log", daemon=True)
        self._thread.start()

    def write(self, event: AnyEvent) -> None:
        self._pending.append(event)
        if len(self._pending) >= _MAX_PENDING:
            with self._wake:
                self._wake.notify_all()
                self._wake.wait_for(lambda: len(self._pending) < _MAX_PENDING or self._error is not None)
        if self._error is not None:
            self._raise()

    def flush(self) -> None:
        """Raise an error of the thread, if there is one; the thread writes by itself."""
        self._raise()

    def wait_written(self, timeout_s: float) -> bool:
        """Have the thread write at once; return whether all is on disk within `timeout_s`."""
        with self._wake:
            self._awaited = True
            self._wake.notify_all()
            done = self._wake.wait_for(lambda: not self._awaited or self._error is not None, timeout_s)
        self._raise()
        return done

    def close(self) -> None:
        """Return when everything is on disk and compressed."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        for thread in self._compressing:
            thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise NotWritten.of(self._path, self._error) from self._error

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                with self._wake:
                    self._wake.wait_for(self._due, timeout=_WRITE_EVERY_S)
                    closing, awaited = self._closing, self._awaited
                # `write` appends without the lock, so events are taken one by one.
                self._write_pending()
                self._writer.flush()
                if awaited:
                    self._writer.wait_written(0.0)
                with self._wake:
                    self._awaited = self._awaited and not awaited
                    self._wake.notify_all()
            self._writer.close()
        except BaseException as error:  # The thread's edge: the caller's next call raises it.
            self._error = error
            with suppress(OSError, ValueError):
                self._writer.close()
            with self._wake:
                self._wake.notify_all()
        finally:
            self.cpu_s += time.thread_time()

    def _write_pending(self) -> None:
        while self._pending:
            count = min(len(self._pending), _CHUNK)
            self._writer.write_many([self._pending.popleft() for _ in range(count)])

    def _due(self) -> bool:
        return self._closing or self._awaited or len(self._pending) >= _MAX_PENDING

    def _start_compressing(self, finisher: Finisher, path: Path) -> None:
        def compress() -> None:
            before = time.thread_time()
            try:
                # One after the other, because two writers would spoil the index.
                if earlier is not None:
                    earlier.join()
                finisher.compress(path)
            except BaseException as error:  # The thread's edge, as above.
                self._error = error
            self.cpu_s += time.thread_time() - before

        earlier = self._compressing[-1] if self._compressing else None
        thread = threading.Thread(target=compress, name="event-log-compress", daemon=True)
        self._compressing.append(thread)
        thread.start()
