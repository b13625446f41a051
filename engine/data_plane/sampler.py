"""The claim book, run inside TransferQueue's controller as its sampler.

TransferQueue's controller has one request thread, so every operation here is atomic. A request
carries an operation in its sampling configuration; the reply rides as the tags of a row that
does not exist (index -1), so no row's own tags are ever touched. A row without tags is passed
over: TransferQueue shows a row before its tags.
"""

import time
from collections.abc import Mapping
from typing import Any

from transfer_queue import BaseSampler

from asyncrl.engine.data_plane.book import Book
from asyncrl.engine.errors import AsyncRLError

PAYLOAD = "payload"
REPLY_ROW = -1


def tagged_rows(partition: Any, ready: list[int]) -> dict[str, Mapping[str, Any]]:
    """Return tags by row name for the `ready` rows of a TransferQueue partition that have their own tags."""
    names, found = partition.revert_keys_mapping, partition.custom_meta
    rows = {}
    for index in ready:
        tags = found.get(index)
        # A late tag write to a reused slot would show another row's tags: those count as none.
        if tags and tags.get("row") == names.get(index):
            rows[tags["row"]] = tags
    return rows


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
            reply = self._answer(tagged_rows(partition, ready_indexes), op, arguments or {})
        except AsyncRLError as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        partition.custom_meta[REPLY_ROW] = {"reply": reply}
        return [REPLY_ROW], []

    def _answer(self, rows: Mapping[str, Mapping[str, Any]], op: str, arguments: dict[str, Any]) -> Any:
        if op == "register":
            return self._book.register(**arguments)
        return getattr(self._book, op)(rows, **arguments)
