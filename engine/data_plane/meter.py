"""Counts the bytes of puts and reads by their path, and how long they took."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asyncrl.engine.records.traffic import Flow, Path, Traffic


class Meter:
    """A client's totals. What fails counts for nothing."""

    def __init__(self) -> None:
        self._puts: dict[Path, Flow] = {}
        self._gets: dict[Path, Flow] = {}

    def read(self) -> Traffic:
        return Traffic(dict(self._puts), dict(self._gets))

    @contextmanager
    def putting(self, path: Path, size: int) -> Iterator[None]:
        """Time a put of so many bytes."""
        began = time.perf_counter()
        yield
        _add(self._puts, path, Flow(size, time.perf_counter() - began))

    @contextmanager
    def getting(self, path: Path) -> Iterator[dict[str, int]]:
        """Time a read; who makes it fills in the sizes of what came, by name."""
        began, sizes = time.perf_counter(), dict[str, int]()
        yield sizes
        _add(self._gets, path, Flow(sum(sizes.values()), time.perf_counter() - began))


def _add(flows: dict[Path, Flow], path: Path, more: Flow) -> None:
    flows[path] = flows.get(path, Flow()).plus(more)


def sizes_of(buffers: Mapping[str, object]) -> dict[str, int]:
    """Return the bytes of buffers by name."""
    return {name: int(buffer.nbytes) for name, buffer in buffers.items()}  # type: ignore[attr-defined]
