"""Statistics of filters at the edges of floats, with masked samples, and with tags of the wrong kind."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.errors import TagError
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Verdict, drop, mask, rescue
from asyncrl.filters.builtin.content import Duplicate
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.history import Quota
from asyncrl.filters.builtin.importance import ImportanceOutliers
from asyncrl.filters.builtin.length import Truncated
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.filters.judging import Judgement
from asyncrl.filters.statistics import RunningStatistics
from asyncrl.filters.testing import judge, make_context, make_group


def dropped(filter_: BaseRolloutFilter, *rewards: float, **tags: Any) -> str | None:
    [judgement] = judge(filter_, make_group(rewards, **tags))
    return judgement.dropped


class Plain(BaseRolloutFilter):
    """Has a filter judge one group at a time."""

    def __init__(self, inner: BaseRolloutFilter) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return self.inner.judge(group, context)


class Says(BaseRolloutFilter):
    def __init__(self, verdict: Verdict, stage: str = "claim") -> None:
        self.verdict = verdict
        self.stage = stage  # type: ignore[misc]

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return self.verdict


@pytest.mark.parametrize("offset", [1.0, 1e3, 1e6, -1e6, 1e9, 1e15])
def test_noise_of_single_precision_is_no_spread_at_any_offset(offset: float) -> None:
    """C3: a group whose rewards went through float32, or a mean in it, is flat."""
    third = float(np.float32(offset) + np.float32(offset) / np.float32(3))
    noisy = [third, float(np.nextafter(np.float32(third), np.float32(np.inf))), float(np.float32(third))]
    assert dropped(ZeroStd(), *noisy) == "zero_std"


@pytest.mark.parametrize(("low", "high"), [(1e6, 1e6 + 1), (-1e6, -1e6 - 1), (1e5, 1e5 + 0.1), (0.0, 1e-300)])
def test_rewards_that_single_precision_tells_apart_well_are_a_spread(low: float, high: float) -> None:
    for filter_ in (ZeroStd(), Plain(ZeroStd())):
        assert dropped(filter_, low, high) is None


def test_the_largest_rewards_there_are_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dropped(ZeroStd(), 1.7e308, -1.7e308) is None


@pytest.mark.parametrize("size", [3, 7, 8, 9, 16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, -0.1])
def test_a_mean_on_the_bound_is_inside_it_whatever_the_order_of_the_sum(size: int, reward: float) -> None:
    for band in (DynamicSampling(low=reward), DynamicSampling(high=reward)):
        assert dropped(band, *[reward] * size) is None
        assert dropped(Plain(band), *[reward] * size) is None


def test_a_share_on_the_bound_is_not_over_it() -> None:
    assert dropped(Truncated(0.29), *[0.0, 1.0] * 50, truncated=range(29)) is None
    assert dropped(Truncated(0.29), *[0.0, 1.0] * 50, truncated=range(30)) == "truncated"


@pytest.mark.parametrize(("gap", "mean"), [(math.nan, 0.0), (0.0, math.nan), (math.inf, 0.0), (0.0, -math.inf)])
def test_a_log_ratio_that_is_no_number_is_an_outlier(gap: float, mean: float) -> None:
    for filter_ in (ImportanceOutliers(5.0, 1.0), ImportanceOutliers(5.0)):
        tags: dict[str, Any] = {"log_ratio_max": [0.0, gap, 0.0], "log_ratio_mean": [0.0, mean, 0.0]}
        [judgement] = judge(filter_, make_group([0.0, 1.0, 0.0], **tags))
        expected = {} if math.isinf(mean) and filter_._mean == math.inf else {1: "importance_outliers"}
        assert judgement.masked == expected


@pytest.mark.parametrize("values", [["1", "2"], [1.0, "2"], [[1], [2]], [10**400, 1.0]])
def test_a_tag_of_text_or_lists_is_no_number_in_columns_either(values: list[Any]) -> None:
    group = make_group([0.0, 1.0]).stamp(acc=values)
    for filter_ in (ZeroStd("acc"), DynamicSampling(0.1, tag="acc")):
        with pytest.raises(TagError, match=f"filter {filter_.name}: v10_p0_g.*tag 'acc'.*it must be a finite number"):
            judge(filter_, group)


def test_an_equal_sibling_that_is_not_trained_makes_no_duplicate() -> None:
    """Sample 0 is masked already; masking its twin as well would train neither."""
    chain = Chain([Says(mask([0], "other", keep_reward=True)), Duplicate()])
    [judgement] = chain.judge([make_group([0.0, 1.0, 1.0], response_hash=[7, 7, 7])], make_context())
    assert judgement.masked == {0: "Says/other", 2: "duplicate"}
    assert judgement.trained == (1,)


def test_no_rescue_lifts_the_rule_of_few_live_samples_even_from_a_later_mask() -> None:
    chain = Chain([Says(rescue(["few_live"])), Says(mask([0], "gone", keep_reward=False))])
    assert [j.dropped for j in chain.judge([make_group([0.0, 1.0])], make_context())] == ["few_live"]


def test_a_rescue_at_the_claim_lifts_a_drop_after_log_probabilities() -> None:
    chain = Chain([Says(rescue(["Says/off"])), Says(drop("off"), "after_logprobs")])
    kept = chain.judge([make_group([0.0, 1.0])], make_context())
    assert [j.dropped for j in chain.judge_after_logprobs(kept, make_context())] == [None]
    [judgement] = kept
    bare = Judgement(judgement.group, None, "", {}, judgement.live, judgement.trained)
    assert [j.dropped for j in chain.judge_after_logprobs([bare], make_context())] == ["Says/off"]


def test_a_quota_is_of_the_last_groups_that_passed() -> None:
    """An independent count: among any `window` groups in a row that passed, math has at most its share."""
    filter_ = Quota({"math": 0.25}, window=8)
    names = ["math" if i % 2 else "code" for i in range(200)]
    groups = [make_group([0.0, 1.0], group=i, dataset=name) for i, name in enumerate(names)]
    kept = [j.group.dataset for j in judge(filter_, *groups) if j.dropped is None]
    assert all(kept[i : i + 8].count("math") <= 2 for i in range(len(kept) - 7))
    assert kept.count("math") >= len(kept) // 4 - 2


def test_a_quota_goes_on_after_a_restart_as_if_there_had_been_none() -> None:
    groups = [make_group([0.0, 1.0], group=i, dataset="math" if i % 3 else "code") for i in range(60)]
    whole = [j.dropped for j in judge(Quota({"math": 0.3}, window=16), *groups)]
    old, new = Quota({"math": 0.3}, window=16), Quota({"math": 0.3}, window=16)
    first = [j.dropped for j in judge(old, *groups[:40])]
    new.load_state_dict(old.state_dict())
    assert first + [j.dropped for j in judge(new, *groups[40:])] == whole


def test_asking_for_the_history_of_an_unknown_prompt_does_not_invent_one() -> None:
    seen = RunningStatistics()
    assert seen.prompts.get(3) is None
    with pytest.raises(KeyError):
        seen.prompts[3]
    assert seen.state_dict() == {"prompts": {}, "datasets": {}}
