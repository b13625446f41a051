"""Deals by differences, against the book's example and brute force."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.planning.karmarkar_karp import assign_by_differences
from asyncrl.trainers.planning.samples import loads_of


def test_differences_of_the_books_example() -> None:
    """Karmarkar and Karp's 8, 7, 6, 5, 4: 16 and 14, where halves of 15 exist and longest first makes 17 and 13."""
    costs = np.array([8.0, 7, 6, 5, 4])
    rank = assign_by_differences(costs, ranks=2)
    assert sorted(loads_of(rank, costs, count=2).tolist()) == [14, 16]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_every_sample_is_dealt_once_and_no_deal_is_worse_than_four_thirds(costs: list[int], ranks: int) -> None:
    some = np.array(costs, np.float64)
    rank = assign_by_differences(some, ranks=ranks)
    assert rank.shape == some.shape
    assert set(rank.tolist()) <= set(range(ranks))
    best = min(
        max(sum(c for c, at in zip(costs, where, strict=True) if at == r) for r in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(costs))
    )
    assert loads_of(rank, some, count=ranks).max() <= 4 / 3 * best
