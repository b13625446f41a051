"""Whether rewards differ is judged so that float noise never passes."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.records.spread import is_flat

REWARDS = st.floats(-1e6, 1e6, allow_nan=False)


@pytest.mark.parametrize(
    "rewards", [[0.35] * 7, [0.1] * 3, [0.35] * 5, [0.1] * 7, [0.0] * 4, [-1e-30] * 3, [1e30] * 3, [1.0], []]
)
def test_equal_rewards_are_flat_though_their_float_deviation_is_not_zero(rewards: list[float]) -> None:
    """C3: the numbers whose deviation a float computation gets wrong."""
    assert is_flat(rewards)
    assert is_flat([float(value) for value in np.array(rewards, dtype=np.float32)])


def test_the_numbers_of_the_case_do_deceive_a_computed_deviation() -> None:
    """C3: the premise, so that the test above means something."""
    assert np.std([0.1] * 3) > 0
    assert np.std(np.array([0.35] * 7, dtype=np.float32)) > 0


@pytest.mark.parametrize(
    "rewards",
    [[0.35] * 7 + [0.0], [0.0, 1.0], [0.0, 0.0, 0.0, 1e-9], [-0.5, 0.5], [1.0, 1.00001], [0.0, 0.1, 0.2, 0.3]],
)
def test_rewards_that_differ_are_not_flat(rewards: list[float]) -> None:
    """C3, C11."""
    assert not is_flat(rewards)


@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), order=st.randoms())
@settings(deadline=None)
def test_flat_is_a_range_within_a_millionth_of_the_largest_in_any_order(rewards: list[float], order: object) -> None:
    exact = [Fraction(reward) for reward in rewards]
    spread, scale = max(exact) - min(exact), max(map(abs, exact))
    if abs(spread - scale / 10**6) > scale / 10**9 or scale == 0:
        assert is_flat(rewards) == (spread <= scale / 10**6)
    assert is_flat(rewards) == is_flat(sorted(rewards))


def test_the_tolerance_is_the_callers() -> None:
    assert is_flat([1.0, 1.05], relative_tolerance=0.1)
    assert not is_flat([1.0, 1.0 + 1e-12], relative_tolerance=0.0)
