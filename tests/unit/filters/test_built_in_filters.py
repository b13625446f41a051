"""What staleness, zero_std and dynamic_sampling drop, and the parameters that they refuse."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncrl.engine.errors import TagError
from asyncrl.engine.testing.fakes import fake_group
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.trainers.loss.advantages import group_advantages


def dropped(filter_: BaseRolloutFilter, *groups: Any, version: int = 5) -> list[str | None]:
    judged = Chain([filter_]).judge(groups, FilterContext(trainer_version=version, step=version, seed=0))
    return [judgement.dropped for judgement in judged]


def kept_versions(max_age: int, versions: Sequence[int]) -> set[int]:
    groups = [fake_group(i, [0.0, 1.0], version=version) for i, version in enumerate(versions)]
    out = dropped(Staleness(max_age=max_age), *groups)
    assert set(out) <= {None, "staleness/stale"}
    return {group.version for group, reason in zip(groups, out, strict=True) if reason is None}


@pytest.mark.parametrize(("bound", "kept"), [(0, {5}), (1, {4, 5}), (2, {3, 4, 5}), (3, {2, 3, 4, 5})])
def test_a_group_is_stale_when_its_age_exceeds_the_limit_not_when_it_equals_it(bound: int, kept: set[int]) -> None:
    """CASE-A1."""
    assert kept_versions(bound, [2, 3, 4, 5]) == kept


@pytest.mark.parametrize("versions", [[6], [55, 57]])
def test_a_version_newer_than_the_trainers_is_an_error_and_never_fresh(versions: list[int]) -> None:
    """CASE-A1, CASE-A5: a negative age does not pass."""
    with pytest.raises(TagError, match="newer than the trainer's"):
        kept_versions(9, versions)


def test_a_group_is_judged_by_its_oldest_version_not_its_newest() -> None:
    """CASE-A7."""
    group = fake_group(0, [0.0, 1.0], version=3, end_version=6)
    assert dropped(Staleness(max_age=2), group, version=6) == ["staleness/stale"]
    assert dropped(Staleness(max_age=3), group, version=6) == [None]


def test_a_dataset_may_have_a_limit_of_its_own() -> None:
    filter_ = Staleness(max_age=3, max_age_by_dataset={"code": 0})
    groups = [fake_group(i, [0.0, 1.0], version=4, dataset=name) for i, name in enumerate(["code", "math"])]
    assert dropped(filter_, *groups) == ["staleness/stale", None]
    assert dropped(Staleness(max_age_by_dataset={"code": 0}), *groups) == ["staleness/stale", None]
    assert dropped(Staleness(), *groups, version=400) == [None, None]


def test_zero_std_decides_by_group_and_keeps_groups_whole() -> None:
    """C2: leave-one-out statistics would take the odd one out of the first group only."""
    rows = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4]
    judged = Chain([ZeroStd()]).judge([fake_group(i, row) for i, row in enumerate(rows)], FilterContext(0, 0, 0))
    assert [j.dropped for j in judged] == [None, None, None, "zero_std"]
    assert [len(j.trained) for j in judged[:3]] == [4, 4, 4]


@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.1] * 3, [0.35] * 5, [0.1] * 7, [0.0] * 4, [-1e9] * 4])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_are_flat_whatever_float_noise_does(rewards: list[float], baseline: Any) -> None:
    """C3: dropped as zero_std, and their advantages are 0."""
    assert dropped(ZeroStd(), fake_group(0, rewards)) == ["zero_std"]
    assert group_advantages(rewards, baseline=baseline, scale="std") == [0.0] * len(rewards)


def test_noise_in_the_last_bit_is_no_spread() -> None:
    """C3: rewards that went through float32, or a sum in another order."""
    assert dropped(ZeroStd(), fake_group(0, [0.3, 0.1 + 0.2, 0.30000001192092896])) == ["zero_std"]


def test_a_lone_zero_among_equal_rewards_keeps_the_group_and_gets_an_advantage_of_a_few_deviations() -> None:
    """C3, FOUND-L2: with leave-one-out its siblings are flat; dividing by their noise would give thousands."""
    rewards = [0.35] * 7 + [0.0]
    assert dropped(ZeroStd(), fake_group(0, rewards)) == [None]
    assert group_advantages(rewards, baseline="leave_one_out", scale="std")[-1] == pytest.approx(-8 / 7**0.5)


@pytest.mark.parametrize("rewards", [[1e-9, 2e-9], [0.0, 1e-12], [1e9, 1.1e9]])
def test_a_real_spread_is_kept_at_any_scale(rewards: list[float]) -> None:
    assert dropped(ZeroStd(), fake_group(0, rewards)) == [None]


def test_the_tolerance_is_a_share_of_the_largest_magnitude() -> None:
    group = fake_group(0, [1.0, 1.01])
    assert dropped(ZeroStd(relative_tolerance=0.02), group) == ["zero_std"]
    # 1 is half of 2, and all of 1.
    assert dropped(ZeroStd(relative_tolerance=0.5), fake_group(0, [1.0, 2.0])) == ["zero_std"]
    assert dropped(ZeroStd(relative_tolerance=0.0), fake_group(0, [1.0, 1.0 + 1e-12])) == [None]


def test_zero_std_reads_the_configured_raw_tag() -> None:
    """C11: all wrong by accuracy, but with shaped scores."""
    group = fake_group(0, [0.0, 0.1, 0.2, 0.3], acc=[0.0] * 4, score=[0.0, 0.1, 0.2, 0.3])
    assert dropped(ZeroStd(tag="acc"), group) == ["zero_std"]
    assert dropped(ZeroStd(tag="score"), group) == [None]
    assert dropped(ZeroStd(), group) == [None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.25, None, ["dynamic_sampling/out_of_band", None, None, None]),
        (None, 0.75, [None, None, None, "dynamic_sampling/out_of_band"]),
        (0.25, 0.75, ["dynamic_sampling/out_of_band", None, None, "dynamic_sampling/out_of_band"]),
        (None, None, [None] * 4),
    ],
)
def test_dynamic_sampling_keeps_means_inside_its_band_bounds_included(
    low: float | None, high: float | None, expected: list[str | None]
) -> None:
    rows = [[0.0] * 4, [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0] * 4]
    groups = [fake_group(i, row) for i, row in enumerate(rows)]
    assert dropped(DynamicSampling(low=low, high=high), *groups) == expected


def test_a_mean_of_zero_is_inside_a_band_that_begins_or_ends_there() -> None:
    """No float noise hides a wrong comparison at 0."""
    group = fake_group(0, [-1.0, 1.0])
    assert dropped(DynamicSampling(low=0.0), group) == [None]
    assert dropped(DynamicSampling(high=0.0), group) == [None]


def test_dynamic_sampling_takes_its_mean_over_live_samples_of_its_tag() -> None:
    group = fake_group(0, [0.0, 0.0, 9.0, 9.0], failed=[2, 3], acc=[1.0, 1.0, None, None])
    assert dropped(DynamicSampling(low=0.5, tag="acc"), group) == [None]
    assert dropped(DynamicSampling(low=0.5), group) == ["dynamic_sampling/out_of_band"]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Staleness(max_age=-1), "max_age is -1; it must be an integer of at least 0"),
        (lambda: Staleness(max_age=1.5), "max_age is 1.5"),  # type: ignore[arg-type]
        (lambda: Staleness(max_age=True), "max_age is True"),
        (lambda: Staleness(max_age_by_dataset={"code": -2}), "code is -2"),
        (lambda: ZeroStd(relative_tolerance=-0.1), "relative_tolerance is -0.1"),
        (lambda: ZeroStd(relative_tolerance=1.0), r"relative_tolerance is 1.0; it must be in \[0, 1\)"),
        (lambda: ZeroStd(relative_tolerance=float("nan")), "relative_tolerance is nan"),
        (lambda: DynamicSampling(max_attempts=0), "max_attempts is 0; it must be an integer of at least 1"),
        (lambda: DynamicSampling(max_attempts=-1), "max_attempts is -1"),
        (lambda: DynamicSampling(max_attempts=True), "max_attempts is True"),
        (lambda: DynamicSampling(max_attempts=2.5), "max_attempts is 2.5"),  # type: ignore[arg-type]
        (lambda: DynamicSampling(on_exhausted="stop"), "on_exhausted is 'stop'.*error.*train_partial.*wait"),  # type: ignore[arg-type]
        (lambda: DynamicSampling(low=0.8, high=0.2), "low is 0.8 and high 0.2"),
        (lambda: DynamicSampling(low=float("nan")), "low is nan; it must be a finite number"),
        (lambda: DynamicSampling(high="1"), "high is '1'"),  # type: ignore[arg-type]
    ],
)
def test_a_parameter_that_cannot_work_is_refused_with_its_name_value_and_range(
    build: Callable[[], BaseRolloutFilter], says: str
) -> None:
    """C1: zero attempts are refused; J1."""
    with pytest.raises(ValueError, match=says):
        build()
