"""The claim book: groups stay whole, two claimers never share one, time is only the fallback."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.engine.data_plane.book import Book, PartitionBook
from asyncrl.engine.data_plane.rows import group_row_tags
from asyncrl.engine.data_plane.watched import WatchedDict
from asyncrl.engine.errors import ClaimLost
from asyncrl.engine.records.keys import row_of, sample_keys

SPEC = {"group_size": 2, "columns": ("x",), "consumers": ("a", "b"), "later": ()}
LEASE_S = 10.0


@dataclass
class Desk:
    """A book over rows that a test lays out, and its clock."""

    now: float = 0.0
    rows: WatchedDict[str, Mapping[str, Any]] = field(default_factory=WatchedDict)

    def __post_init__(self) -> None:
        self._book = Book(lambda: self.now, LEASE_S)
        self._book.register("p", SPEC)

    @property
    def book(self) -> PartitionBook:
        return self._book.of("p", self.rows)

    def put(self, number: int, version: int = 0) -> str:
        keys = sample_keys(version, number, 2)
        self.rows[row_of(keys[0])] = group_row_tags(keys, ("x",), {"version": version, "group": number})
        return row_of(keys[0])

    def claim(
        self, max_groups: int, claim_id: str, owner: str = "o", consumer: str = "a", later: tuple[str, ...] = ()
    ) -> dict[str, int]:
        reply = self.book.claim(consumer, ("x", *later), max_groups, owner, claim_id)
        return dict.fromkeys(reply["rows"], reply["fence"])

    def leased(self, fences: Mapping[str, int], consumer: str = "a") -> list[str]:
        return self.book.leased(consumer, fences)


def test_a_lease_expires_only_after_its_time_and_a_renewal_pushes_it_out() -> None:
    desk = Desk()
    row = desk.put(0)
    fences = desk.claim(1, "first")
    desk.now = LEASE_S
    assert desk.leased(fences) == [row]
    desk.book.renew("a", fences)
    desk.now = 2 * LEASE_S
    assert desk.claim(1, "second", owner="heir") == {}
    desk.now += 0.1
    taken = desk.claim(1, "third", owner="heir")
    assert list(taken) == [row]
    assert desk.leased(fences) == []
    with pytest.raises(ClaimLost, match=row):
        desk.book.renew("a", fences)
    assert desk.leased(taken) == [row]


def test_an_expired_claim_stands_until_another_owner_takes_its_group() -> None:
    """FOUND-C4: time ends the claims of the lost; who asks lives, and is not given its own group again."""
    desk = Desk()
    rows = [desk.put(0), desk.put(1)]
    fences = desk.claim(2, "first")
    desk.now = LEASE_S + 0.1
    assert desk.claim(2, "second") == {}
    assert desk.leased(fences) == rows
    assert desk.book.consumption("a") == {"ready": 2, "claimed": 0, "passed_over": 0}
    desk.book.renew("a", fences)
    assert desk.claim(2, "third", owner="heir") == {}
    desk.now *= 3
    assert list(desk.book.clear(sample_keys(0, 0, 2), "a", {rows[0]: fences[rows[0]]})) == [rows[0]]
    assert list(desk.claim(2, "fourth", owner="heir")) == [rows[1]]
    with pytest.raises(ClaimLost, match=rows[1]):
        desk.book.clear(sample_keys(0, 1, 2), "a", fences)


def test_a_row_that_the_store_lost_is_not_held() -> None:
    desk = Desk()
    row = desk.put(0)
    fences = desk.claim(1, "first")
    del desk.rows[row]
    assert desk.leased(fences) == []
    assert desk.book.consumption("a") == {"ready": 0, "claimed": 0, "passed_over": 0}


def test_a_row_that_is_there_again_between_two_looks_is_not_held() -> None:
    """Another put made it: whoever held the first one holds nothing, and the second one can be claimed."""
    desk = Desk()
    row = desk.put(0)
    fences = desk.claim(1, "first")
    del desk.rows[row]
    assert desk.put(0) == row
    assert desk.leased(fences) == []
    assert list(desk.claim(1, "second", owner="heir")) == [row]


def test_a_row_goes_with_its_last_key_whenever_its_first_was_cleared() -> None:
    desk = Desk()
    row = desk.put(0)
    first, last = sample_keys(0, 0, 2)
    assert desk.book.clear([first]) == {}
    assert desk.book.keys() == [last]
    assert list(desk.book.clear([last])) == [row]
    assert desk.book.keys() == []


def test_what_was_cleared_of_a_row_is_not_of_the_next_put_of_its_name() -> None:
    desk = Desk()
    row, keys = desk.put(0), sample_keys(0, 0, 2)
    assert desk.book.clear(keys[:1]) == {}
    del desk.rows[row]
    assert desk.put(0) == row
    assert desk.book.keys() == list(keys)
    assert list(desk.claim(1, "first")) == [row]


def test_the_memory_of_claim_ids_and_cleared_rows_is_bounded() -> None:
    desk = Desk()
    for number in range(5000):
        row = desk.put(number)
        fences = desk.claim(1, str(number))
        assert list(desk.book.clear(sample_keys(0, number, 2), "a", fences)) == [row]
        del desk.rows[row]
    assert len(desk.book._claims) == 4096
    assert len(desk.book._cleared) <= 1
    desk.book.reap([f"dead{number}" for number in range(5000)])
    assert len(desk.book._dead) == 4096
    assert desk.claim(1, "one more") == {}
    assert list(desk.book._leases["a"].items()) == []


class Claimers(RuleBasedStateMachine):
    """Random operations against a model: by consumer, who holds a row under which number."""

    @initialize()
    def start(self) -> None:
        self.desk = Desk()
        self.numbers = 0
        self.claim_ids = 0
        self.last_fence = 0
        self.holders: dict[tuple[str, str], tuple[str, int, float]] = {}
        self.stale: list[tuple[str, str, int]] = []
        self.cleared: dict[str, set[str]] = {}
        self.dead: set[str] = set()

    def live(self, consumer: str, row: str) -> tuple[str, int, float] | None:
        holder = self.holders.get((consumer, row))
        return holder if holder and row in self.desk.rows else None

    def safe(self, consumer: str, row: str, owner: str = "") -> bool:
        """Whether a row is held, and `owner` may not take it."""
        holder = self.live(consumer, row)
        return holder is not None and (holder[2] >= self.desk.now or holder[0] == owner)

    def end(self, consumer: str, row: str) -> None:
        _, fence, _ = self.holders.pop((consumer, row))
        self.stale.append((consumer, row, fence))

    @rule(version=st.integers(0, 3))
    def put(self, version: int) -> None:
        self.desk.put(self.numbers, version)
        self.numbers += 1

    @rule(consumer=st.sampled_from("ab"), owner=st.sampled_from("wxyz"), max_groups=st.integers(0, 3))
    def claim(self, consumer: str, owner: str, max_groups: int) -> None:
        claim_id = f"{owner}/{self.claim_ids}"
        self.claim_ids += 1
        if owner in self.dead:
            with pytest.raises(ClaimLost, match="declared dead"):
                self.desk.claim(max_groups, claim_id, owner, consumer)
            return
        free = sorted(
            (tags["tags"]["version"], tags["tags"]["group"], row)
            for row, tags in self.desk.rows.items()
            if not self.safe(consumer, row, owner) and not self.cleared.get(row)
        )
        fences = self.desk.claim(max_groups, claim_id, owner, consumer)
        assert list(fences) == [row for _, _, row in free[:max_groups]]
        assert self.desk.claim(max_groups, claim_id, owner, consumer) == fences or not fences
        for row, fence in fences.items():
            assert fence > self.last_fence
            if (consumer, row) in self.holders:
                self.end(consumer, row)
            self.holders[(consumer, row)] = (owner, fence, self.desk.now + LEASE_S)
        self.last_fence = max([self.last_fence, *fences.values()])

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.desk.now += seconds

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.holders:
            consumer, row = data.draw(st.sampled_from(sorted(self.holders)))
            fence = self.holders[(consumer, row)][1]
            self.desk.book.give_back(consumer, {row: fence})
            self.end(consumer, row)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if self.holders:
            consumer, row = data.draw(st.sampled_from(sorted(self.holders)))
            owner, fence, _ = self.holders[(consumer, row)]
            if self.live(consumer, row):
                self.desk.book.renew(consumer, {row: fence})
                self.holders[(consumer, row)] = (owner, fence, self.desk.now + LEASE_S)

    @rule(owner=st.sampled_from("xyz"))
    def reap(self, owner: str) -> None:
        expected = sorted(row for (c, row), h in self.holders.items() if h[0] == owner and self.live(c, row))
        assert sorted(self.desk.book.reap([owner])) == expected
        for consumer, row in [place for place, holder in self.holders.items() if holder[0] == owner]:
            self.end(consumer, row)
        self.dead.add(owner)

    @rule(data=st.data(), samples=st.sets(st.integers(0, 1), min_size=1))
    def clear(self, data: st.DataObject, samples: set[int]) -> None:
        if self.holders:
            consumer, row = data.draw(st.sampled_from(sorted(self.holders)))
            if not self.live(consumer, row):
                return
            keys = [self.desk.rows[row]["keys"][i] for i in samples]
            gone = self.desk.book.clear(keys, consumer, {row: self.holders[(consumer, row)][1]})
            self.cleared.setdefault(row, set()).update(keys)
            assert list(gone) == ([row] if len(self.cleared[row]) == 2 else [])
            for name in gone:
                del self.desk.rows[name]

    @rule(data=st.data())
    def try_a_stale_number(self, data: st.DataObject) -> None:
        places = [place for place in self.stale if place[1] in self.desk.rows]
        if places:
            consumer, row, fence = data.draw(st.sampled_from(places))
            left = [key for key in self.desk.rows[row]["keys"] if key not in self.cleared.get(row, ())]
            with pytest.raises(ClaimLost):
                self.desk.book.clear(left, consumer, {row: fence})
            with pytest.raises(ClaimLost):
                self.desk.book.renew(consumer, {row: fence})
            self.desk.book.give_back(consumer, {row: fence})

    @invariant()
    def each_row_is_held_by_its_one_holder_and_keys_are_what_is_not_cleared(self) -> None:
        for (consumer, row), (_, fence, _) in self.holders.items():
            assert self.desk.leased({row: fence}, consumer) == ([row] if self.live(consumer, row) else [])
        for consumer, row, fence in self.stale:
            assert self.desk.leased({row: fence}, consumer) == []
        for consumer in "ab":
            counts = self.desk.book.consumption(consumer)
            held = [row for row in self.desk.rows if self.safe(consumer, row)]
            free = [row for row in self.desk.rows if row not in held and not self.cleared.get(row)]
            assert counts == {"ready": len(free), "claimed": len(held), "passed_over": 0}
        expected = {k for row, tags in self.desk.rows.items() for k in tags["keys"]} - set().union(
            *self.cleared.values()
        )
        assert set(self.desk.book.keys()) == expected


TestClaimers = Claimers.TestCase
TestClaimers.settings = settings(deadline=None, max_examples=30, stateful_step_count=40)
