"""The chain: order, first drop, rescue, masks, groups with too few live samples, state."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncrl.engine.errors import FilterError
from asyncrl.engine.testing.fakes import fake_group
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Judgement, Verdict
from asyncrl.filters import drop as drop_
from asyncrl.filters import keep as keep_
from asyncrl.filters import mask as mask_
from asyncrl.filters import rescue as rescue_
from asyncrl.filters.base import AFTER_LOGPROBS
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling, Refill
from asyncrl.filters.builtin.zero_std import ZeroStd

CONTEXT = FilterContext(trainer_version=5, step=5, seed=7)


class Says(BaseRolloutFilter):
    """Always says `verdict`; notes the groups that it saw."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.seen: list[GroupView] = []

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self.seen.append(group)
        return self.verdict


class Counts(BaseRolloutFilter):
    """Drops every group after the first `quota` it has seen in its life."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.count = 0

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self.count += 1
        return keep_() if self.count <= self.quota else drop_("quota")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def judge(filters: Sequence[BaseRolloutFilter], *rewards: Sequence[float | None], min_live: int = 2) -> list[Judgement]:
    groups = [fake_group(i, row) for i, row in enumerate(rewards)]
    return Chain(filters, min_live=min_live).judge(groups, CONTEXT)


def test_the_first_drop_wins_and_later_filters_do_not_see_the_group() -> None:
    first, second = Says(drop_("first")), Says(drop_("second"))
    [judgement] = judge([first, second], [0.0, 1.0])
    assert (judgement.dropped, judgement.by) == ("Says/first", "Says")
    assert len(first.seen) == 1
    assert second.seen == []


def test_the_first_drop_wins_where_later_filters_judge_all_rows_in_columns() -> None:
    """The second group keeps the second filter going, which computes on the dropped row as well."""
    groups = [fake_group(0, [0.0, 0.0]), fake_group(1, [0.0, 2.0])]
    context = FilterContext(trainer_version=0, step=0, seed=0)
    chain = Chain([ZeroStd(), DynamicSampling(low=0.5)])
    assert [judgement.dropped for judgement in chain.judge(groups, context)] == ["zero_std", None]
    assert chain.stats["dynamic_sampling"].dropped == {}


def test_filters_are_asked_in_the_users_order() -> None:
    assert [j.dropped for j in judge([ZeroStd(), Says(drop_("all"))], [1.0, 1.0], [0.0, 1.0])] == [
        "zero_std",
        "Says/all",
    ]
    assert [j.dropped for j in judge([Says(drop_("all")), ZeroStd()], [1.0, 1.0], [0.0, 1.0])] == [
        "Says/all",
        "Says/all",
    ]


def test_a_rescue_before_the_drop_lifts_it_and_one_after_comes_too_late() -> None:
    rescue = Says(rescue_(["zero_std"]))
    assert judge([rescue, ZeroStd()], [1.0, 1.0])[0].dropped is None
    assert judge([ZeroStd(), rescue], [1.0, 1.0])[0].dropped == "zero_std"


def test_a_rescue_lifts_only_the_reasons_that_it_names() -> None:
    assert judge([Says(rescue_(["stale"])), ZeroStd()], [1.0, 1.0])[0].dropped == "zero_std"
    both = [Says(rescue_(["stale"])), Says(rescue_(["zero_std"])), ZeroStd(), Says(drop_("stale"))]
    assert judge(both, [1.0, 1.0])[0].dropped is None


def test_a_rescue_does_not_lift_the_rule_of_few_live_samples() -> None:
    assert judge([Says(rescue_(["few_live"]))], [1.0, None])[0].dropped == "few_live"


def test_a_rescue_of_a_bare_string_is_refused() -> None:
    with pytest.raises(TypeError, match="list of reasons"):
        rescue_("zero_std")


def test_a_masked_sample_with_its_reward_still_counts_in_the_statistics() -> None:
    after = Says(keep_())
    [judgement] = judge([Says(mask_([0], "long", keep_reward=True)), ZeroStd(), after], [0.0, 1.0, 1.0])
    assert judgement.dropped is None
    assert judgement.masked == {0: "Says/long"}
    assert (judgement.live, judgement.trained) == ((0, 1, 2), (1, 2))
    assert (after.seen[0].live, after.seen[0].trained) == ((0, 1, 2), (1, 2))


def test_a_masked_sample_without_its_reward_is_as_if_it_had_never_been() -> None:
    [judgement] = judge([Says(mask_([0], "long", keep_reward=False)), ZeroStd()], [0.0, 1.0, 1.0])
    assert judgement.dropped == "zero_std"
    assert judgement.live == (1, 2)


def test_masking_below_min_live_drops_the_group_before_the_next_filter_sees_it() -> None:
    after = Says(drop_("later"))
    [judgement] = judge([Says(mask_([0, 1], "long", keep_reward=False)), after], [0.0, 1.0, 1.0])
    assert (judgement.dropped, after.seen) == ("few_live", [])


def test_the_first_reason_of_a_mask_stays() -> None:
    twice = [Says(mask_([1], "first", keep_reward=True)), Says(mask_([1, 2], "second", keep_reward=True))]
    assert judge(twice, [0.0, 1.0, 1.0])[0].masked == {1: "Says/first", 2: "Says/second"}


@pytest.mark.parametrize(
    ("rewards", "live", "dropped"),
    [
        ([1.0, math.nan, 0.0, 1.0], (0, 2, 3), None),
        ([1.0, math.inf, 0.0, -math.inf], (0, 2), None),
        ([1.0, None, 0.0, 1.0], (0, 2, 3), None),
        ([math.nan] * 4, (), "few_live"),
        ([1.0, math.nan, math.nan, math.nan], (0,), "few_live"),
    ],
)
def test_a_reward_that_is_not_finite_is_masked_and_does_not_count(
    rewards: list[float | None], live: tuple[int, ...], dropped: str | None
) -> None:
    """C4: NaN is neither zero nor spread; a group with one live reward is a single survivor."""
    [judgement] = judge([ZeroStd()], rewards)
    assert (judgement.live, judgement.dropped) == (live, dropped)
    assert judgement.trained == live
    assert judgement.masked == {i: "nan_reward" for i in range(4) if i not in live}


def test_failed_samples_leave_the_statistics_and_a_single_survivor_is_dropped() -> None:
    """CASE-C6, CASE-H1: one live sample has nothing to be compared with."""
    three, one = fake_group(0, [1.0, 0.0, 1.0, 1.0], failed=[3]), fake_group(1, [1.0] * 4, failed=[1, 2, 3])
    judgements = Chain([ZeroStd()]).judge([three, one], CONTEXT)
    assert [(j.live, j.dropped) for j in judgements] == [((0, 1, 2), None), ((0,), "few_live")]
    assert judgements[0].masked == {}


def test_min_live_is_a_parameter() -> None:
    assert judge([], [0.0, 1.0, None], min_live=3)[0].dropped == "few_live"
    assert judge([], [0.0, 1.0, None], min_live=2)[0].dropped is None


def test_a_sample_without_trainable_tokens_does_not_make_a_flat_group_look_mixed() -> None:
    """FOUND-L4, C12: the 0 of an empty response beside three 1s gives no gradient, so the group is flat."""
    group = fake_group(0, [0.0, 1.0, 1.0, 1.0], trainable_tokens=[0, 2, 2, 2])
    assert GroupView.of(group).live == GroupView.of(group).trained == (1, 2, 3)
    [judgement] = Chain([ZeroStd()]).judge([group], CONTEXT)
    assert (judgement.live, judgement.trained, judgement.dropped) == ((1, 2, 3), (1, 2, 3), "zero_std")
    assert judgement.masked == {0: "no_trainable_tokens"}
    few = fake_group(1, [0.0, 1.0, 1.0, 1.0], trainable_tokens=[2, 0, 0, 0])
    assert Chain([]).judge([few], CONTEXT)[0].dropped == "few_live"


@pytest.mark.parametrize("after_logprobs", [False, True])
def test_its_reward_counts_once_a_filter_asks_for_it_to_be_kept(after_logprobs: bool) -> None:
    """FOUND-L4: mask(..., keep_reward=True) keeps the reward of an empty response; without it, it stays away."""
    group = fake_group(0, [0.0, 1.0, 1.0, 1.0], trainable_tokens=[0, 2, 2, 2])
    for keep_reward, live in ((True, (0, 1, 2, 3)), (False, (1, 2, 3))):
        says: BaseRolloutFilter = Says(mask_([0], "empty", keep_reward=keep_reward))
        if after_logprobs:
            says.stage = AFTER_LOGPROBS  # type: ignore[misc]
        chain = Chain([says, *([] if after_logprobs else [ZeroStd()])])
        [judgement] = chain.judge([group], CONTEXT)
        if after_logprobs:
            [judgement] = chain.judge_after_logprobs([judgement], CONTEXT)
        assert (judgement.live, judgement.trained) == (live, (1, 2, 3))
        assert judgement.dropped == (None if keep_reward or after_logprobs else "zero_std")
        assert judgement.masked == {0: "no_trainable_tokens"}


def test_groups_come_out_whole_and_in_order_with_the_tags_they_had() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    judgements = judge([Says(mask_([0], "long", keep_reward=True)), ZeroStd()], *rows)
    assert [j.group.group for j in judgements] == [0, 1, 2]
    for judgement, row in zip(judgements, rows, strict=True):
        assert judgement.group.keys == fake_group(judgement.group.group, row).keys
        assert list(judgement.group.rewards) == row


def test_random_numbers_depend_on_seed_step_and_group_alone() -> None:
    views = [GroupView.of(fake_group(i, [0.0, 1.0])) for i in range(3)]

    def draws(context: FilterContext, order: Sequence[int]) -> dict[int, float]:
        return {i: context.rng(views[i]).random() for i in order}

    base = draws(CONTEXT, [0, 1, 2])
    assert draws(CONTEXT, [2, 0, 1]) == base
    assert len(set(base.values())) == 3
    assert draws(FilterContext(trainer_version=5, step=6, seed=7), [0])[0] != base[0]
    assert draws(FilterContext(trainer_version=5, step=5, seed=8), [0])[0] != base[0]


def test_state_goes_through_state_dict_and_back() -> None:
    old = Chain([ZeroStd(), Counts(2)])
    old.judge([fake_group(0, [0.0, 1.0])], CONTEXT)
    new = Chain([ZeroStd(), Counts(2)])
    new.load_state_dict(old.state_dict())
    judged = new.judge([fake_group(i, [0.0, 1.0]) for i in (1, 2)], CONTEXT)
    assert [j.dropped for j in judged] == [None, "Counts/quota"]


def test_state_of_another_chain_is_refused() -> None:
    saved = Chain([Counts(2), ZeroStd()]).state_dict()
    with pytest.raises(FilterError, match="the saved chain"):
        Chain([ZeroStd(), Counts(2)]).load_state_dict(saved)
    with pytest.raises(ValueError, match="has no state"):
        ZeroStd().load_state_dict({"count": 1})


def test_the_presence_of_dynamic_sampling_turns_refill_on() -> None:
    assert Chain([ZeroStd()]).refill is None
    chain = Chain([ZeroStd(), DynamicSampling(max_attempts=3, on_exhausted="wait")])
    assert chain.refill == Refill(3, "wait")


def test_time_is_counted_by_filter() -> None:
    ticks = iter(range(100))
    chain = Chain([ZeroStd(), Says(keep_())], clock=lambda: float(next(ticks)))
    chain.judge([fake_group(0, [0.0, 1.0])], CONTEXT)
    chain.judge([fake_group(1, [0.0, 1.0])], CONTEXT)
    assert {name: stats.seconds for name, stats in chain.stats.items()} == {
        "front_end": 0.0,
        "zero_std": 2.0,
        "Says": 2.0,
    }


class Raises(BaseRolloutFilter):
    """Raises `error` from `judge`, or, with `where`, from `state_dict` or its tagger."""

    def __init__(self, error: BaseException, where: str = "judge") -> None:
        self.error = error
        self.where = where
        self.taggers = {"words": self.tag}  # type: ignore[misc]

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        if self.where == "judge":
            raise self.error
        return keep_()

    def state_dict(self) -> dict[str, Any]:
        if self.where == "state_dict":
            raise self.error
        return {"ids": {1, 2}} if self.where == "json" else {}

    def tag(self, tokens: Sequence[int]) -> int:
        raise self.error


def test_a_filter_that_exits_is_an_error_with_its_name() -> None:
    """FOUND-C14: sys.exit(0) in a filter would end the run as if it were done."""
    for error in (SystemExit(0), GeneratorExit(), asyncio.CancelledError()):
        with pytest.raises(FilterError, match=r"filter Raises raised (SystemExit|GeneratorExit|CancelledError)"):
            Chain([Raises(error)]).judge([fake_group(0, [0.0, 1.0])], CONTEXT)
        with pytest.raises(FilterError, match="filter Raises: its tagger 'words' raised"):
            Chain([Raises(error, "tagger")]).taggers["words"]([1, 2])
        with pytest.raises(FilterError, match="filter Raises: state_dict"):
            Chain([Raises(error, "state_dict")]).state_dict()


def test_a_keyboard_interrupt_in_a_filter_is_the_users() -> None:
    """FOUND-C14: it stays what it is."""
    with pytest.raises(KeyboardInterrupt):
        Chain([Raises(KeyboardInterrupt())]).judge([fake_group(0, [0.0, 1.0])], CONTEXT)


def test_state_that_is_not_json_names_its_filter() -> None:
    """FOUND-C15: before anything is written."""
    with pytest.raises(FilterError, match=r"filter Raises: state_dict must return plain JSON values.*set"):
        Chain([ZeroStd(), Raises(SystemExit(), "json")]).state_dict()
