"""A batch on its way from the task that assembles to the task that trains.

Invariant: one batch waits at most, and `take` is called before anything else is assembled.
"""

from collections.abc import Callable

import anyio

from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.loop.batch import Batch


class Handover:
    """A place for one batch. `changed` tells of every batch that comes or has gone."""

    def __init__(self, take: Callable[[Batch], None], changed: Signal) -> None:
        self._take = take
        self._changed = changed
        self._batch: Batch | None = None
        self._taken = anyio.Event()
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether a batch waits for the trainer."""
        return self._batch is not None

    async def offer(self, batch: Batch) -> None:
        """Return once the trainer has taken a batch."""
        self._batch, self._taken = batch, anyio.Event()
        self._changed.notify()
        try:
            await self._taken.wait()
        finally:
            if self._batch is batch:  # The task that offered it is cancelled, so nobody may take it.
                self._batch = None
        self._changed.notify()

    async def next(self) -> Batch | None:
        """Take the next batch; None after the last one."""
        await self._changed.wait_until(lambda: self._batch is not None or self._closed)
        batch, self._batch = self._batch, None
        if batch is not None:
            self._take(batch)
            self._taken.set()
        return batch

    def close(self) -> None:
        """Say that no more batches come."""
        self._closed = True
        self._changed.notify()
