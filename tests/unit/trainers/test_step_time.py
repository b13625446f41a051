"""The line through predicted FLOPs and measured seconds, against closed forms."""

import math

import numpy as np
import pytest

from asyncrl.trainers.cost.step_time import StepTime


def line(flops: float) -> float:
    return 0.5 + 3e-12 * flops


def test_a_line_is_found_and_predicted() -> None:
    model = StepTime()
    assert model.seconds([1e12]) is None
    for base in (2e12, 5e12, 9e12, 4e12):
        flops = [base, base * 1.001]
        model.observe(flops, [line(f) for f in flops])
    assert model.seconds_per_flop == pytest.approx(3e-12)
    assert model.overhead_s == pytest.approx(0.5)
    assert model.seconds([7e12, 0.0]) == pytest.approx([line(7e12), 0.5])


def test_older_steps_count_less_exactly_as_weighted_least_squares_says() -> None:
    """Against numpy's least squares with weights forgetting^age over all pairs but those of the first step."""
    rng = np.random.default_rng(1)
    steps = [(f := rng.uniform(1e12, 4e12, 3), (0.5 + 3e-12 * f) * rng.uniform(0.9, 1.1, 3)) for _ in range(12)]
    model = StepTime(forgetting=0.7)
    for flops, seconds in steps:
        model.observe(flops.tolist(), seconds.tolist())
    x = np.concatenate([flops for flops, _ in steps[1:]]) / 1e12
    y = np.concatenate([seconds for _, seconds in steps[1:]])
    root = np.sqrt(np.repeat(0.7 ** np.arange(len(steps) - 2, -1, -1), 3))
    slope, overhead = np.linalg.lstsq(np.stack([x, np.ones_like(x)], 1) * root[:, None], y * root, rcond=None)[0]
    assert model.seconds_per_flop == pytest.approx(slope / 1e12)
    assert model.overhead_s == pytest.approx(overhead)


def test_the_step_that_compiles_does_not_count() -> None:
    model = StepTime()
    model.observe([1e12, 1e12], [60.0, 61.0])
    assert model.seconds_per_flop is None
    model.observe([1e12, 1e12], [2.0, 2.0])
    assert model.seconds([3e12]) == pytest.approx([6.0])


def test_a_late_compilation_hardly_matters_and_a_slower_machine_does() -> None:
    """A step 30 times as long as predicted weighs (3 / 30)^2: closed form of the mean of 1, 1, 1 and that one of 30."""
    model = StepTime(forgetting=1.0, skip_steps=0)
    for _ in range(3):
        model.observe([1e12], [1.0])
    model.observe([1e12], [30.0])
    assert model.seconds([1e12]) == pytest.approx([(3 + 0.01 * 30) / 3.01])
    slower = StepTime()
    for step in range(60):
        slower.observe([1e12], [1.0 if step < 10 else 5.0])
    assert slower.seconds([1e12]) == pytest.approx([5.0], rel=0.05)


def test_equal_flops_leave_the_overhead_at_zero() -> None:
    model = StepTime(skip_steps=0)
    model.observe([2e12, 2e12], [1.0, 1.2])
    assert model.overhead_s == 0
    assert model.seconds([2e12]) == pytest.approx([1.1])


def test_neither_slope_nor_overhead_is_negative() -> None:
    steep, falling = StepTime(skip_steps=0), StepTime(skip_steps=0)
    steep.observe([1e12, 2e12], [1.0, 4.0])
    assert steep.overhead_s == 0
    assert steep.seconds_per_flop == pytest.approx((1 * 1 + 2 * 4) / (1 + 4) * 1e-12)
    falling.observe([1e12, 2e12], [4.0, 1.0])
    assert falling.seconds([1e12, 2e12]) == pytest.approx([2.5, 2.5])


def test_measurements_that_are_none_are_ignored() -> None:
    model = StepTime(skip_steps=0)
    model.observe([1e12, math.nan, 1e12, 0.0], [2.0, 1.0, math.inf, 1.0])
    assert model.seconds([1e12]) == pytest.approx([2.0])
    model.observe([math.nan], [1.0])
    assert model.steps == 1


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"forgetting is 0; it must be above 0"):
        StepTime(forgetting=0)
    with pytest.raises(ValueError, match="2 FLOPs and 1 times"):
        StepTime().observe([1.0, 2.0], [1.0])
