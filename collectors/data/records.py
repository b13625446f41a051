"""What a data set is, wherever it comes from: records by number, each read when it is asked for."""

from typing import Any, Protocol


class Records(Protocol):
    """The records of one set. Opening it reads none of them; it has at least one."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """Return the number, from 1, by which a user finds record `index`: its line or row."""

    def place(self, index: int) -> str:
        """Name a record for an error: file and line."""

    def read(self, index: int) -> Any:
        """Return a record as JSON values; DataError, with its place, if it cannot be decoded."""
