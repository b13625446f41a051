"""Deals by differences, against the book's example and brute force."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.dealing import totals
from asyncrl.trainers.differencing import deal_by_differences
from asyncrl.trainers.packing import pack_into


def test_differences_of_the_books_example() -> None:
    """Karmarkar and Karp's 8, 7, 6, 5, 4: 16 and 14, where halves of 15 exist and longest first makes 17 and 13."""
    costs = np.array([8.0, 7, 6, 5, 4])
    rank = deal_by_differences(costs, ranks=2)
    assert sorted(totals(rank, costs, hands=2).tolist()) == [14, 16]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_every_sample_is_dealt_once_and_no_deal_is_worse_than_four_thirds(costs: list[int], ranks: int) -> None:
    some = np.array(costs, np.float64)
    rank = deal_by_differences(some, ranks=ranks)
    assert rank.shape == some.shape
    assert set(rank.tolist()) <= set(range(ranks))
    best = min(
        max(sum(c for c, at in zip(costs, where, strict=True) if at == r) for r in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(costs))
    )
    assert totals(rank, some, hands=ranks).max() <= 4 / 3 * best


def test_differences_pack_what_swaps_do_not() -> None:
    """Four bins of 100: levelled and swapped, fitted or filled, the twelve sizes leave one over or a bin over it."""
    sizes = np.array([43, 42, 38, 37, 37, 36, 34, 31, 31, 26, 24, 16])
    bins = pack_into(sizes, 4, capacity=100)
    assert bins is not None
    assert np.bincount(bins, weights=sizes).max() <= 100
