"""A claim looks only at what it takes; what it takes is what a scan of all rows would have given it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engine.data_plane.book import Book, PartitionBook
from asyncrl.engine.data_plane.rows import column_row_tags, group_row_tags
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.records.keys import row_of, sample_keys

SPEC = {"group_size": 2, "columns": ("x",), "consumers": ("a", "b"), "later": ("adv", "ref")}
LEASE_S = 10.0


@dataclass
class History:
    """Random operations on a book, and what a scan of all rows says of each claim.

    `held` has, by consumer and row: the put that was leased, its owner, its number and when it runs out.
    """

    random: random.Random
    now: float = 0.0
    rows: WatchedDict[str, Mapping[str, Any]] = field(default_factory=WatchedDict)
    held: dict[tuple[str, str], tuple[str, str, int, float]] = field(default_factory=dict)
    cleared: dict[str, set[str]] = field(default_factory=dict)
    claims: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        self._book = Book(lambda: self.now, LEASE_S)
        self._book.register("p", SPEC)

    @property
    def book(self) -> PartitionBook:
        return self._book.of("p", self.rows)

    def groups(self) -> list[str]:
        return [name for name, tags in self.rows.items() if tags and "of" not in tags]

    def holder(self, consumer: str, name: str) -> tuple[str, str, int, float] | None:
        held = self.held.get((consumer, name))
        return held if held and name in self.groups() and held[0] == self.rows[name]["put"] else None

    def scan(self, consumer: str, owner: str, later: tuple[str, ...], most: int) -> list[str]:
        """Return what a claim takes, by a look at every row."""
        ready = []
        for name in self.groups():
            tags, held = self.rows[name], self.holder(consumer, name)
            columns = [row for row in self.rows.values() if row and row.get("of_put") == tags["put"]]
            has = {(key, row["column"]) for row in columns for key in row["keys"]}
            if (
                (held is None or (held[3] < self.now and held[1] != owner))
                and not self.cleared.get(tags["put"])
                and all((key, column) in has for key in tags["keys"] for column in later)
            ):
                ready.append((tags["tags"]["version"], tags["tags"]["group"], name))
        return [name for _, _, name in sorted(ready)[:most]]

    def claim(self) -> None:
        consumer, owner = self.random.choice("ab"), self.random.choice("wxyz")
        later = self.random.choice([(), ("adv",), ("adv", "ref")])
        most = self.random.choice([0, 1, 1, 2, 5])
        expected = self.scan(consumer, owner, later, most)
        self.claims += 1
        reply = self.book.claim(consumer, ("x", *later), most, owner, str(self.claims))
        assert list(reply["rows"]) == expected
        self.taken += len(expected)
        for name in expected:
            self.held[(consumer, name)] = (self.rows[name]["put"], owner, reply["fence"], self.now + LEASE_S)

    def put(self) -> None:
        """Put a group, now and then one that was there before, or first without its tags."""
        version, number = self.random.randrange(3), self.random.randrange(12)
        keys = sample_keys(version, number, 2)
        name = row_of(keys[0])
        if not self.rows.get(name):
            tags = group_row_tags(keys, ("x",), {"version": version, "group": number})
            self.rows[name] = {} if self.random.random() < 0.2 and name not in self.rows else tags

    def write(self) -> None:
        """Write a later column for all keys of a group or for one, as one of two writers."""
        if self.groups():
            name = self.random.choice(self.groups())
            keys = self.random.choice(
                [self.rows[name]["keys"], self.rows[name]["keys"][:1], self.rows[name]["keys"][1:]]
            )
            column, writer = self.random.choice(["adv", "adv", "ref"]), self.random.choice(["r0", "r1"])
            tags = column_row_tags(name, self.rows[name]["put"], column, writer, keys)
            self.rows[tags["row"]] = tags

    def lose(self) -> None:
        """Remove any row, as a store may that lost a unit."""
        if self.rows:
            del self.rows[self.random.choice(list(self.rows))]

    def some_held(self) -> tuple[str, str] | None:
        held = [place for place in self.held if self.holder(*place)]
        return self.random.choice(held) if held else None

    def give_back(self) -> None:
        place = self.some_held()
        if place:
            self.book.give_back(place[0], {place[1]: self.held.pop(place)[2]})

    def renew(self) -> None:
        place = self.some_held()
        if place:
            put, owner, fence, _ = self.held[place]
            self.book.renew(place[0], {place[1]: fence})
            self.held[place] = (put, owner, fence, self.now + LEASE_S)

    def reap(self) -> None:
        # A name of an owner is used once; this one claims nothing, so it may die often.
        self.book.reap(["nobody"])
        if self.random.random() < 0.1:
            owner = f"once{self.claims}"
            names = self.scan("a", owner, (), 3)
            self.claims += 1
            assert list(self.book.claim("a", ("x",), 3, owner, str(self.claims))["rows"]) == names
            for name in names:
                self.held.pop(("a", name), None)
            assert self.book.reap([owner]) == names

    def clear(self) -> None:
        if self.groups():
            name = self.random.choice(self.groups())
            keys = self.rows[name]["keys"][: self.random.choice([1, 2])]
            gone = self.cleared.setdefault(self.rows[name]["put"], set())
            gone.update(keys)
            left = self.book.clear(keys)
            assert len(gone) == 2 or name not in left
            if self.random.random() < 0.8:
                for row in left:
                    del self.rows[row]

    def wait(self) -> None:
        self.now += self.random.choice([1.0, LEASE_S / 2, LEASE_S + 1])

    def step(self) -> None:
        kinds = [
            self.put,
            self.write,
            self.claim,
            self.give_back,
            self.renew,
            self.reap,
            self.clear,
            self.lose,
            self.wait,
        ]
        self.random.choices(kinds, [5, 4, 6, 2, 2, 1, 1, 1, 1])[0]()
        for (consumer, name), (_, _, fence, _) in self.held.items():
            assert self.book.leased(consumer, {name: fence}) == ([name] if self.holder(consumer, name) else [])


@pytest.mark.parametrize("seed", range(8))
def test_claims_by_index_are_those_of_a_scan_of_all_rows(seed: int) -> None:
    history = History(random.Random(seed))
    for _ in range(250):
        history.step()
    assert history.taken > 20


class CountedRows(WatchedDict[str, Mapping[str, Any]]):
    """Rows that count how many of them were looked at."""

    looks = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(name, default)

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()

    def __iter__(self) -> Any:
        self.looks += len(self)
        return super().__iter__()


def test_the_rows_that_an_operation_looks_at_do_not_grow_with_the_partition() -> None:
    rows = CountedRows()
    history = History(random.Random(0), rows=rows)
    for number in range(2000):
        tags = group_row_tags(sample_keys(0, number, 2), ("x",), {"version": 0, "group": number})
        rows[tags["row"]] = tags
    assert len(history.book.keys()) == 4000
    rows.looks = 0
    for number in range(600):
        reply = history.book.claim("a", ("x",), 1, "o", str(number))
        (row,) = reply["rows"]
        if number % 2:
            history.book.give_back("a", {row: reply["fence"]})
        else:
            history.book.clear(rows[row]["keys"], "a", {row: reply["fence"]})
            del rows[row]
    assert rows.looks < 600
    assert len(history.book._leases["a"]._ends) < 300


def test_a_queue_does_not_keep_groups_that_its_consumer_never_claims() -> None:
    history = History(random.Random(0))
    history.book.claim("a", ("x",), 1, "o", "first")
    for number in range(2000):
        keys = sample_keys(0, number, 2)
        tags = group_row_tags(keys, ("x",), {"version": 0, "group": number})
        history.rows[tags["row"]] = tags
        for row in history.book.clear(keys):
            del history.rows[row]
    assert len(history.book._leases["a"]._queues[()]) < 300
