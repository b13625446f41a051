"""pass@k and intervals, against values by hand and by counting draws."""

import math
from itertools import combinations

import pytest

from asyncrl.engine.records.estimates import Estimate, mean, pass_at_k, reported_k, share


def bounds(found: Estimate) -> list[float]:
    assert found.low is not None
    assert found.high is not None
    return [found.value, found.low, found.high]


def test_pass_at_k_is_the_share_of_draws_with_one_that_passes() -> None:
    """Every draw of k out of n, counted."""
    for samples in range(1, 7):
        for passed in range(samples + 1):
            outcomes = [True] * passed + [False] * (samples - passed)
            for k in range(1, samples + 1):
                draws = [any(draw) for draw in combinations(outcomes, k)]
                assert pass_at_k(samples, passed, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_pass_at_k_agrees_with_the_product_of_its_paper_where_binomials_are_large() -> None:
    """Chen et al. (2021), the numerically stable form of equation 1, in float64."""
    for samples, passed, k in ((200, 3, 100), (1000, 17, 10), (10_000, 1, 5000)):
        product = 1 - math.prod(1 - k / i for i in range(samples - passed + 1, samples + 1))
        assert pass_at_k(samples, passed, k) == pytest.approx(product, rel=1e-12)
    assert pass_at_k(4, 2, 2) == 5 / 6
    assert pass_at_k(2, 1, 2) == 1.0


def test_a_k_without_enough_samples_is_refused() -> None:
    for samples, passed, k in ((4, 2, 5), (4, 2, 0), (4, 5, 1)):
        with pytest.raises(ValueError, match=f"pass@{k} of {passed} passed among {samples}"):
            pass_at_k(samples, passed, k)


def test_powers_of_two_and_the_number_of_samples_are_reported() -> None:
    assert reported_k(1) == [1]
    assert reported_k(4) == [1, 2, 4]
    assert reported_k(6) == [1, 2, 4, 6]


def test_one_sample_per_prompt_has_the_interval_of_wilson() -> None:
    """8 of 10: (0.8 + z²/20 ± z √(0.16/10 + z²/400)) / (1 + z²/10) with z 1.95996, by hand 0.49016 and 0.94332."""
    assert bounds(share([1.0] * 8 + [0.0] * 2, draws=10)) == pytest.approx([0.8, 0.49016, 0.94332], rel=1e-4)
    # z² / (20 + z²): by hand 0.16113.
    assert bounds(share([0.0] * 20, draws=20)) == pytest.approx([0.0, 0.0, 0.16113], rel=1e-4)
    assert share([1.0] * 20, draws=20).high == 1.0


def test_more_samples_narrow_the_interval_as_far_as_prompts_agree() -> None:
    """Prompts that differ are as many trials as there are prompts; equal ones at most as many as there are draws."""
    assert share([0.0, 1.0] * 10, draws=160) == share([0.0, 1.0] * 10, draws=20)
    agreeing, eighty = share([0.5] * 20, draws=80), share([0.0, 1.0] * 40, draws=80)
    assert bounds(agreeing) == pytest.approx(bounds(eighty))


def test_the_interval_of_a_mean_is_two_standard_errors_wide() -> None:
    """1, 2, 3: standard deviation 1, so 1.95996 / √3 = 1.13159 on both sides."""
    assert bounds(mean([1.0, 2.0, 3.0])) == pytest.approx([2.0, 0.86841, 3.13159], rel=1e-4)
    assert mean([2.0]).low is None
