"""The claim book, run inside TransferQueue's controller as its sampler.

TransferQueue's controller has one request thread, so every operation here is atomic. A request
carries an operation in its sampling configuration; the reply rides as the tags of a row that
does not exist (index -1), so no row's own tags are ever touched. TransferQueue shows a row before
its tags, and the rows of other writers; the book goes by its own alone (own_rows.py).
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from transfer_queue import BaseSampler

from asyncrl.engine.data_plane.book import Book
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.errors import AsyncRLError

REPLY_ROW = -1


_NO_TAGS: Mapping[str, Any] = {}


class TaggedRows:
    """Tags by row name of a TransferQueue partition, as they are: none yet, another row's, another writer's."""

    def __init__(self, partition: Any, gone: Iterable[str] = ()) -> None:
        self.partition = partition
        self._gone = tuple(gone)
        # TransferQueue tells nobody of a change, so its own tables do.
        partition.keys_mapping = self._index = WatchedDict[str, int](partition.keys_mapping)
        partition.custom_meta = self._tags = WatchedDict[int, Mapping[str, Any]](partition.custom_meta)

    def get(self, name: str, /) -> Mapping[str, Any] | None:
        return self._tags.get(self._index[name], _NO_TAGS) if name in self._index else None

    def take_changed(self) -> Iterable[str]:
        # A place that is used again has the name of its row by now.
        names: Mapping[int, str] = self.partition.revert_keys_mapping
        tagged = [names[at] for at in self._tags.take_changed() if at in names]
        gone, self._gone = self._gone, ()
        return dict.fromkeys([*gone, *self._index.take_changed(), *tagged])

    def names(self) -> Iterable[str]:
        return self._index.keys()


class BookSampler(BaseSampler):  # type: ignore[misc]
    """Answers `{"op": name, "arguments": {...}}` from the book; consumes nothing in TransferQueue.

    `each` answers several such calls at once, each by itself.
    """

    def __init__(self, lease_s: float = 600.0) -> None:
        super().__init__()
        self._book = Book(time.monotonic, lease_s)
        self._rows: dict[str, TaggedRows] = {}

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Let operations through even when no row is ready, as none ever is of the field that they ask for."""
        return bool((sampling_config or {}).get("op"))

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        partition: Any = None,
        op: str = "",
        arguments: dict[str, Any] | None = None,
        **_: Any,
    ) -> tuple[list[int], list[int]]:
        if partition is None:
            raise ValueError("the partition does not exist; register it first")
        rows = self._rows_of(partition)
        if op == "each":
            reply = [self._reply(rows, *call) for call in (arguments or {})["calls"]]
        else:
            reply = self._reply(rows, op, arguments or {})
        partition.custom_meta[REPLY_ROW] = {"reply": reply}
        return [REPLY_ROW], []

    def _reply(self, rows: TaggedRows, op: str, arguments: Mapping[str, Any]) -> Any:
        """Return what the book answers, or which error it raised."""
        try:
            return self._answer(rows, op, **arguments)
        except AsyncRLError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # The edge of TransferQueue's controller, which would answer without a name.
            return {"error": "DataPlaneError", "message": f"{op} failed in the store: {type(error).__name__}: {error}"}

    def _answer(self, rows: TaggedRows, op: str, partition: str, **arguments: Any) -> Any:
        if op == "register":
            return self._book.register(partition, **arguments)
        return getattr(self._book.of(partition, rows), op)(**arguments)

    def _rows_of(self, partition: Any) -> TaggedRows:
        rows = self._rows.get(partition.partition_id)
        if rows is None or rows.partition is not partition:
            # Somebody may have removed the partition with all its rows, and made it anew.
            rows = TaggedRows(partition, rows.names() if rows else ())
            self._rows[partition.partition_id] = rows
        return rows
