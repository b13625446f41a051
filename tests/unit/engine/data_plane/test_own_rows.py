"""Which rows of a store are ours: looked at once for their tags, forgotten with them, waited for at first."""

from collections.abc import Mapping
from typing import Any

from asyncrl.engine.data_plane.book import Book
from asyncrl.engine.data_plane.own_rows import OwnRows
from asyncrl.engine.data_plane.rows import column_row_tags, group_row_tags
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.records.keys import sample_keys

PATIENCE_S = 10.0
SPEC = {"group_size": 2, "columns": ("x",), "consumers": ("a",), "later": ()}


def tags_of(number: int) -> dict[str, Any]:
    return group_row_tags(sample_keys(0, number, 2), ("x",), {"version": 0, "group": number})


def test_a_row_that_stays_without_tags_is_named_after_a_leases_time() -> None:
    """FOUND-I12: a store shows a row before its tags, so at first it may be one of ours."""
    clock = [0.0]
    own = OwnRows(2, lambda: clock[0], PATIENCE_S)
    rows: WatchedDict[str, Mapping[str, Any]] = WatchedDict({"v0_p0": {}, "v0_p1": tags_of(0), "v0_p2": tags_of(2)})
    for clock[0] in (0.0, PATIENCE_S):
        own.look(rows)
        assert list(own) == ["v0_p2"]
        assert own.passed_over == {}
    clock[0] = PATIENCE_S + 0.1
    assert own.look(rows) == []
    assert list(own) == ["v0_p2"]
    assert sorted(own.passed_over) == ["v0_p0", "v0_p1"]
    assert "no tags of its own for 10 s" in own.passed_over["v0_p0"]
    rows["v0_p1"] = tags_of(1)
    del rows["v0_p0"]
    own.look(rows)
    assert sorted(own) == ["v0_p1", "v0_p2"]
    assert own.passed_over == {}


def test_a_row_that_is_gone_is_forgotten_and_its_successor_looked_at_anew() -> None:
    own = OwnRows(2, lambda: 0.0, PATIENCE_S)
    rows: WatchedDict[str, Mapping[str, Any]] = WatchedDict()
    for number in range(3):
        rows.clear()
        name = tags_of(number)["row"]
        rows[name] = tags_of(number)
        column = column_row_tags(name, rows[name]["put"], "adv", "rank0", (f"{name}_g0",))
        rows[column["row"]] = column
        own.look(rows)
        assert list(own) == [name, column["row"]]
        assert own.columns_of(name) == (column["row"],)
    odd = {**tags_of(2), "put": "../../else"}
    rows[odd["row"]] = odd
    assert own.look(rows) == [(name, tags_of(2) | {"put": column["of_put"]})]
    assert list(own) == [column["row"]]
    assert "put" in own.passed_over[odd["row"]]
    rows.clear()
    own.look(rows)
    assert (list(own), own.passed_over, own._columns) == ([], {}, {})


def test_every_field_that_another_writer_may_have_left_out_or_bent_is_noticed() -> None:
    """FOUND-I12: no operation of the book may die of what it reads in a row."""
    own = tags_of(0)
    column = column_row_tags("v0_p0", own["put"], "adv", "rank0", ("v0_p0_g0",))
    bent: tuple[Any, ...] = (None, 7, "text", [7], [], {"a": 1})
    for row in (own, column):
        cases = [(field, odd) for field in row for odd in bent if (field, odd) != ("columns", [])]
        for field, odd in cases:
            book = Book(lambda: 0.0)
            book.register("p", SPEC)
            desk = book.of("p", WatchedDict({own["row"]: own, row["row"]: {**row, field: odd}}))
            assert row["row"] not in desk._rows, (field, odd)
            desk.clear(["v0_p0_g0", "v0_p0_g1"])
