"""What is to be deleted: each row by one caller, and what came too late for its group by whoever clears next."""

from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.engine.data_plane.book import Book, PartitionBook
from asyncrl.engine.data_plane.rows import column_row_tags, group_row_tags
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.errors import MissingRows
from asyncrl.engine.records.keys import sample_keys

KEYS = sample_keys(0, 0, 2)
LEASE_S = 10.0


class Store:
    """Rows, a book over them, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rows: WatchedDict[str, Mapping[str, Any]] = WatchedDict()
        self._book = Book(lambda: self.now, LEASE_S)
        self._book.register("p", {"group_size": 2, "columns": ("x",), "consumers": ("a",), "later": ("adv",)})

    @property
    def book(self) -> PartitionBook:
        return self._book.of("p", self.rows)

    def put(self) -> str:
        """Put the group, and return which put it is."""
        tags = group_row_tags(KEYS, ("x",), {"version": 0, "group": 0})
        self.rows[tags["row"]] = tags
        put: str = tags["put"]
        return put

    def write(self, put: str) -> str:
        """Add a column to a put of the group, and return the name of its row."""
        tags = column_row_tags("v0_p0", put, "adv", "rank0", KEYS)
        self.rows[tags["row"]] = tags
        name: str = tags["row"]
        return name

    def clear(self) -> list[str]:
        return sorted(self.book.clear(KEYS))


def test_a_row_is_given_to_one_caller_to_delete_and_to_another_after_a_leases_time() -> None:
    """A caller that died on the way leaves nothing for ever; one that is slow is not overtaken."""
    store = Store()
    column = store.write(store.put())
    assert store.clear() == ["v0_p0", column]
    store.now = LEASE_S
    assert store.clear() == []
    store.now += 0.1
    assert store.clear() == ["v0_p0", column]
    assert store.clear() == []
    store.rows.clear()
    assert store.clear() == []
    assert store.book._deleting == {}


def test_a_column_that_comes_after_the_clear_of_its_group_goes_with_the_next_clear() -> None:
    store = Store()
    put = store.put()
    store.clear()
    del store.rows["v0_p0"]
    column = store.write(put)
    assert sorted(store.book.leftovers()) == [column]


def test_a_late_column_of_an_earlier_put_is_none_of_the_group_put_again() -> None:
    store = Store()
    late = store.put()
    again = store.put()
    column = store.write(late)
    with pytest.raises(MissingRows, match="adv"):
        store.book.locate(KEYS, ["adv"])
    assert store.book.claim("a", ["x", "adv"], 1, "o", "c")["rows"] == {}
    assert sorted(store.book.leftovers()) == [column]
    store.write(again)
    assert set(store.book.locate(KEYS, ["adv"])) == {column}
    assert store.book.leftovers() == {}
