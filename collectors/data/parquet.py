"""Parquet: row groups are read when a record of theirs is asked for, and kept within a budget of memory.

Invariant: opening a file reads its footer alone.
"""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl.collectors.data.plain import plain
from asyncrl.engine.errors import ConfigError, DataError

KEPT_BYTES = 1 << 30
"""Row groups that are kept, decoded. A shuffled order asks for all of them in turn: a file of more than this reads a
whole row group for most of its records, and is faster as JSONL."""


class ParquetFile:
    """The records of a Parquet file. ConfigError if it cannot be read as such, or `pyarrow` is missing."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ConfigError(f"{path} is Parquet, which needs pyarrow: install asyncrl[data]") from None
        self._path = path
        self._failures: tuple[type[Exception], ...] = (pyarrow.ArrowException, OSError)
        try:
            self._file: Any = parquet.ParquetFile(path)
        except self._failures as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
        footer = self._file.metadata
        self._ends = list(accumulate(footer.row_group(group).num_rows for group in range(footer.num_row_groups)))
        self._tables: OrderedDict[int, Any] = OrderedDict()
        if not len(self):
            raise ConfigError(f"{path} holds no record")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def number(self, index: int) -> int:
        return index + 1

    def place(self, index: int) -> str:
        return f"{self._path}, row {self.number(index)}"

    def read(self, index: int) -> Any:
        group = bisect_right(self._ends, index)
        first = self._ends[group - 1] if group else 0
        try:
            return plain(self._table(group).slice(index - first, 1).to_pylist()[0], self.place(index))
        except self._failures as error:
            raise DataError(f"{self.place(index)} cannot be read: {error}") from error

    def _table(self, group: int) -> Any:
        table = self._tables.get(group)
        if table is None:
            table = self._tables[group] = self._file.read_row_group(group)
            while len(self._tables) > 1 and sum(kept.nbytes for kept in self._tables.values()) > KEPT_BYTES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return table
