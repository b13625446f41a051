"""Subset sums: bins filled to the last token, and the part of a group nearest to what is wanted."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.planning.subset_sums import closest_subset, fill_bins


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.floats(0, 1))
def test_the_closest_subset_is_that_of_brute_force(costs: list[int], share: float) -> None:
    numbers, wanted = np.array(costs, np.float64), share * sum(costs)
    misses = [
        abs(sum(some) - wanted) for n in range(len(costs) + 1) for some in itertools.combinations(numbers.tolist(), n)
    ]
    assert abs(float(numbers[closest_subset(numbers, wanted)].sum()) - wanted) == pytest.approx(min(misses))


def test_a_bin_gets_its_largest_sample_and_what_fills_the_rest() -> None:
    """Beside 7 of 10 there is room for 3: 2 and 1 fill it, where the next that fits, another 2, would not."""
    assert fill_bins([7, 5, 2, 2, 1], 2, capacity=10).tolist() == [0, 1, 0, 1, 0]
