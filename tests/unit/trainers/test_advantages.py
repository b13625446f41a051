"""Group-relative advantages against closed forms and NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.loss.advantages import Baseline, Scale, group_advantages

SETTINGS: list[tuple[Baseline, Scale]] = [
    ("mean", "std"),
    ("mean", "none"),
    ("leave_one_out", "std"),
    ("leave_one_out", "none"),
]
EACH = pytest.mark.parametrize(("baseline", "scale"), SETTINGS)
distinct = st.lists(st.integers(-20, 20), min_size=2, max_size=9).filter(lambda r: len(set(r)) > 1)


@EACH
@given(distinct)
@settings(deadline=None, max_examples=40)
def test_advantages_are_the_papers_formulas(baseline: Baseline, scale: Scale, rewards: list[int]) -> None:
    """GRPO, Dr. GRPO and RLOO, computed with NumPy; the spread is the whole group's."""
    values = np.array(rewards, dtype=float)
    found = group_advantages(list(values), baseline=baseline, scale=scale)
    spread = float(values.std()) if scale == "std" else 1.0
    for i, advantage in enumerate(found):
        others = values if baseline == "mean" else np.delete(values, i)
        assert advantage == pytest.approx((values[i] - others.mean()) / spread, rel=1e-9, abs=1e-12)


def test_one_right_answer_of_four_has_the_known_numbers() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    root = math.sqrt(3)
    third = 1 / 3
    assert group_advantages(rewards, baseline="mean", scale="std") == pytest.approx([root, *[-1 / root] * 3])
    assert group_advantages(rewards, baseline="mean", scale="none") == pytest.approx([0.75, *[-0.25] * 3])
    assert group_advantages(rewards, baseline="leave_one_out", scale="none") == pytest.approx([1.0, *[-third] * 3])


def test_the_odd_one_out_is_not_divided_by_the_noise_between_its_siblings() -> None:
    """FOUND-L2: leave one out of [1, 0.001, 0, 0] gave 2120.6; of [0.35] * 7 + [0.0] the lone 0 gets -8 / √7."""
    found = group_advantages([1.0, 0.001, 0.0, 0.0], baseline="leave_one_out", scale="std")
    assert found == pytest.approx([2.3094, -0.7678, -0.7708, -0.7708], abs=1e-4)
    rewards = [0.35] * 7 + [0.0]
    odd = group_advantages(rewards, baseline="leave_one_out", scale="std")
    assert odd == pytest.approx([8 / 7 / math.sqrt(7)] * 7 + [-8 / math.sqrt(7)])
    assert group_advantages(rewards, baseline="leave_one_out", scale="none")[-1] == pytest.approx(-0.35, abs=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@settings(deadline=None, max_examples=80)
@given(
    pattern=st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-1, 1)), min_size=2, max_size=17),
    offset=st.sampled_from([0.0, 1.0, -1e6, 1e12]),
    spread=st.sampled_from([1.0, 1e-3, 1e-9, 1e-300, 5e-324, 1e30, 1e307]),
)
def test_an_advantage_is_bounded_by_the_size_of_its_group_alone(
    baseline: Baseline, pattern: list[float], offset: float, spread: float
) -> None:
    """FOUND-L2: however small the spread and large the offset, √(n - 1), times n / (n - 1) with leave one out."""
    n = len(pattern)
    found = group_advantages([offset + spread * value for value in pattern], baseline=baseline, scale="std")
    bound = math.sqrt(n - 1) * (n / (n - 1) if baseline == "leave_one_out" else 1)
    assert all(math.isfinite(advantage) for advantage in found)
    assert max(map(abs, found)) <= bound * (1 + 1e-6)


@EACH
@pytest.mark.parametrize(
    "rewards",
    [
        [0.35] * 7,
        [0.1] * 3,
        [0.35] * 5,
        [0.1] * 7,
        [1.0] * 4,
        [0.0] * 4,
        [-0.7] * 6,
        [0.5],
        [0.1 + 0.2, 0.3, 0.3],
        [1e9, 1e9],
        [1e-9] * 3,
    ],
)
def test_equal_rewards_teach_nothing(baseline: Baseline, scale: Scale, rewards: list[float]) -> None:
    """C3: equal up to float noise means exactly 0, and no NaN from a negative variance."""
    assert group_advantages(rewards, baseline=baseline, scale=scale) == [0.0] * len(rewards)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(baseline: Baseline, scale: Scale, bad: float) -> None:
    for rewards in ([1.0, bad, 0.0], [bad, bad], [bad]):
        with pytest.raises(ValueError, match="finite"):
            group_advantages(rewards, baseline=baseline, scale=scale)


@EACH
@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.35, -1e6, 1e-6, 1e12]), min_size=1, max_size=8))
def test_advantages_are_finite_whatever_the_finite_rewards(
    baseline: Baseline, scale: Scale, rewards: list[float]
) -> None:
    found = group_advantages(rewards, baseline=baseline, scale=scale)
    assert len(found) == len(rewards)
    assert all(math.isfinite(advantage) for advantage in found)
