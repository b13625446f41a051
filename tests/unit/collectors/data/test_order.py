"""The order of records: a shuffle without a list, mixtures by weight, and a place that can be saved."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.collectors.data.mixture import Mixture
from asyncrl.collectors.data.permutation import Permutation

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(
    lambda found: {f"set{i}": n for i, n in enumerate(found)}
)


@given(st.integers(1, 3000), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_every_record_comes_once(size: int, seed: int) -> None:
    permutation = Permutation(size, str(seed))
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_the_shuffle_is_one() -> None:
    """Of 4,000 keys each record of 10 comes first about 400 times, and neighbours part as in a random order."""
    firsts = Counter(Permutation(10, str(key))(0) for key in range(4000))
    assert all(abs(firsts[record] - 400) < 100 for record in range(10))
    order = [Permutation(10_000, "key")(place) for place in range(2000)]
    assert sum(abs(a - b) for a, b in pairwise(order)) / 1999 == pytest.approx(10_000 / 3, rel=0.1)


def test_ten_million_records_take_no_longer_than_ten() -> None:
    permutation = Permutation(10_000_000, "key")
    assert len({permutation(place) for place in range(1000)}) == 1000
    assert max(permutation(place) for place in range(1000)) < 10_000_000


@given(sizes, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_without_weights_each_epoch_is_every_record_once(sizes: dict[str, int], seed: int) -> None:
    mixture, count = Mixture(sizes, seed=seed), sum(sizes.values())
    every = sorted((which, index) for which, size in enumerate(sizes.values()) for index in range(size))
    epochs = [[mixture.draw() for _ in range(count)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [every] * 3
    assert epochs[0] != epochs[1] or max(sizes.values()) < 10


@given(sizes, st.data())
@settings(max_examples=30, deadline=None)
def test_every_set_has_its_share_at_any_time(sizes: dict[str, int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    mixture, drawn = Mixture(sizes, weights, seed=0), [0] * len(sizes)
    for turn in range(1, 200):
        which, index = mixture.draw()
        assert 0 <= index < list(sizes.values())[which]
        drawn[which] += 1
        behind = [turn * weight / sum(weights) - count for weight, count in zip(weights, drawn, strict=True)]
        assert all(abs(by) < len(sizes) for by in behind)


@given(sizes, st.integers(0, 150), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_restored_mixture_goes_on_as_the_undisturbed_one(sizes: dict[str, int], drawn: int, weighted: bool) -> None:
    weights = [1.5 + i for i in range(len(sizes))] if weighted else None
    whole, other = Mixture(sizes, weights, seed=5), Mixture(sizes, weights, seed=5)
    for _ in range(drawn):
        whole.draw()
    other.restore(whole.state())
    assert [whole.draw() for _ in range(100)] == [other.draw() for _ in range(100)]


def test_the_order_is_a_function_of_the_seed() -> None:
    def order(seed: int) -> list[tuple[int, int]]:
        mixture = Mixture({"a": 30, "b": 20}, seed=seed)
        return [mixture.draw() for _ in range(50)]

    assert order(1) == order(1) != order(2)


def test_a_place_in_other_sets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the sets \['b'\], and the data has \['a'\]"):
        Mixture({"a": 1}, seed=0).restore({"b": 0})
