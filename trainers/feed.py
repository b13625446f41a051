"""A rank's micro-batches with their rows; the next rows are read while one micro-batch is computed.

Invariants: at most one read is in flight; a rank reads each group once, with all its keys that the rank will need;
values are dropped after their last use; nothing is left when the context ends.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.ending import first_cause
from asyncrl.engine.records.keys import row_of
from asyncrl.trainers.fetch import Fetch, Values


@asynccontextmanager
async def feed(
    fetch: Fetch, batches: Sequence[MicroBatch], *, columns: Sequence[str]
) -> AsyncIterator[MemoryObjectReceiveStream[Values]]:
    """Yield a stream that gives, for each of `batches` in order, its columns by name, one value per key.

    If a read fails, its own error is raised from the context, and ends what runs inside it.
    """
    out, into = anyio.create_memory_object_stream[Values](0)
    try:
        async with into, out, anyio.create_task_group() as tasks:
            tasks.start_soon(_read_ahead, _Shelf(fetch, batches, columns), out)
            yield into
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        raise cause from cause.__cause__


async def _read_ahead(shelf: "_Shelf", out: MemoryObjectSendStream[Values]) -> None:
    """Hand over one micro-batch after the other. The stream has no buffer, so the next one, once read, waits here."""
    for place in range(len(shelf.batches)):
        await out.send(await shelf.take(place))


class _Shelf:
    """Values that were read and are still needed, by column and key."""

    def __init__(self, fetch: Fetch, batches: Sequence[MicroBatch], columns: Sequence[str]) -> None:
        self.batches = batches
        self._fetch = fetch
        self._columns = columns
        self._held: dict[str, dict[str, object]] = {}
        self._last_use = {key: place for place, batch in enumerate(batches) for key in batch.keys}
        self._keys_of: dict[str, list[str]] = {}
        for key in self._last_use:
            self._keys_of.setdefault(row_of(key), []).append(key)

    async def take(self, place: int) -> Values:
        keys = self.batches[place].keys
        rows = dict.fromkeys(row_of(key) for key in keys)
        unread = [key for row in rows for key in self._keys_of.pop(row, ())]
        if unread:
            found = await self._fetch.read(unread, self._columns)
            for name, values in found.items():
                self._held.setdefault(name, {}).update(zip(unread, values, strict=True))
        taken: Values = {name: [held[key] for key in keys] for name, held in self._held.items()}
        for key in {key for key in keys if self._last_use[key] == place}:
            for held in self._held.values():
                held.pop(key)
        return taken
