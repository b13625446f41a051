"""The claim book, run inside TransferQueue's controller as its sampler.

TransferQueue's controller has one request thread, so every operation here is atomic. A request
carries an operation in its sampling configuration; the reply rides as the tags of a row that
does not exist (index -1), so no row's own tags are ever touched. TransferQueue shows a row before
its tags, and the rows of other writers; the book is given its own alone (own_rows.py).
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from transfer_queue import BaseSampler

from asyncrl.engine.data_plane.book import Book
from asyncrl.engine.errors import AsyncRLError

REPLY_ROW = -1


_NO_TAGS: Mapping[str, Any] = {}


class TaggedRows(Mapping[str, Mapping[str, Any]]):
    """Tags by row name of a TransferQueue partition, as they are: none yet, another row's, another writer's.

    A view for the length of one operation. Looking up a name costs the same in any partition.
    """

    def __init__(self, partition: Any) -> None:
        self._index: Mapping[str, int] = partition.keys_mapping
        self._tags: Mapping[int, Mapping[str, Any]] = partition.custom_meta

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._tags.get(self._index[name], _NO_TAGS)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def items(self) -> list[tuple[str, Mapping[str, Any]]]:  # type: ignore[override]
        """Return all at once: claims and clears go through every row."""
        tags = self._tags
        return [(name, tags.get(at, _NO_TAGS)) for name, at in self._index.items()]

    def __len__(self) -> int:
        return len(self._index)


class BookSampler(BaseSampler):  # type: ignore[misc]
    """Answers `{"op": name, "arguments": {...}}` from the book; consumes nothing in TransferQueue."""

    def __init__(self, lease_s: float = 600.0) -> None:
        super().__init__()
        self._book = Book(time.monotonic, lease_s)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Let operations through even when no row is ready."""
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
        try:
            reply = self._answer(TaggedRows(partition), op, arguments or {})
        except AsyncRLError as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # The edge of TransferQueue's controller, which would answer without a name.
            reply = {"error": "DataPlaneError", "message": f"{op} failed in the store: {type(error).__name__}: {error}"}
        partition.custom_meta[REPLY_ROW] = {"reply": reply}
        return [REPLY_ROW], []

    def _answer(self, rows: Mapping[str, Mapping[str, Any]], op: str, arguments: dict[str, Any]) -> Any:
        if op == "register":
            return self._book.register(**arguments)
        return getattr(self._book, op)(self._book.own(rows, arguments["partition"]), **arguments)
