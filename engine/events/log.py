"""The event log: one writer, append only; every fold sees each event as it is written."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from asyncrl.engine.events.types import AnyEvent

FILE_NAME = "events.jsonl"


class Fold(Protocol):
    """Something that an event log folds into."""

    def apply(self, event: AnyEvent) -> None: ...


class EventLog:
    """Numbers events and hands them to `folds`; with a `path` it also writes them there.

    Lines are buffered; `flush` puts them in the file (each step), `close` also syncs them.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        folds: Sequence[Fold] = (),
        path: Path | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._start = clock()
        self._folds = tuple(folds)
        self._file: IO[bytes] | None = path.open("wb") if path else None
        self._encoder = msgspec.json.Encoder()
        self._seq = 0

    def append(self, event: AnyEvent) -> None:
        self._seq += 1
        event = msgspec.structs.replace(
            event, seq=self._seq, t=round(self._clock() - self._start, 6), wall=round(self._wall(), 3)
        )
        if self._file is not None:
            self._file.write(self._encoder.encode(event) + b"\n")
        for fold in self._folds:
            fold.apply(event)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Yield the events of a log file; a torn last line is passed over, any other bad line raises."""
    decoder = msgspec.json.Decoder(AnyEvent)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
