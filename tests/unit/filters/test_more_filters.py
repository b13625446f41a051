"""The built-in filters on length, content, reward, history, quota and importance: what each drops or masks."""

from asyncrl.filters import Chain, Judgement
from asyncrl.filters.builtin.content import Duplicate, Repetition
from asyncrl.filters.builtin.history import Difficulty, Quota
from asyncrl.filters.builtin.importance import ImportanceOutliers
from asyncrl.filters.builtin.length import Length, Overlong, Truncated
from asyncrl.filters.builtin.reward import FiniteReward, MinLive
from asyncrl.filters.load import build_chain
from asyncrl.filters.statistics import RunningStatistics
from asyncrl.filters.taggers import repetition, response_hash
from asyncrl.filters.testing import judge, make_context, make_group


def only(judgements: list[Judgement]) -> Judgement:
    [judgement] = judgements
    return judgement


def test_length_is_judged_on_live_samples_bounds_included() -> None:
    filter_ = Length(min_tokens=2, max_tokens=5)
    for lengths, dropped in (([2, 5], None), ([1, 5], "length/too_short"), ([2, 6], "length/too_long")):
        assert only(judge(filter_, make_group([0.0, 1.0], lengths=lengths))).dropped == dropped
    failed = make_group([0.0, 1.0, 1.0], lengths=[3, 3, 3], failed=[2])
    assert only(judge(filter_, failed)).dropped is None


def test_overlong_masks_what_the_limit_cut_and_its_reward_counts_if_asked() -> None:
    group = make_group([0.0, 1.0, 1.0], truncated=[0])
    kept = only(judge(Overlong(), group))
    assert (kept.masked, kept.live, kept.trained) == ({0: "overlong"}, (0, 1, 2), (1, 2))
    assert only(judge(Overlong(keep_reward=False), group)).live == (1, 2)
    by_length = only(judge(Overlong(max_tokens=9), make_group([0.0, 1.0], lengths=[8, 9])))
    assert by_length.masked == {1: "overlong"}


def test_truncated_drops_a_group_when_more_than_its_share_was_cut() -> None:
    assert only(judge(Truncated(0.5), make_group([0.0, 1.0], truncated=[0]))).dropped is None
    assert only(judge(Truncated(0.4), make_group([0.0, 1.0], truncated=[0]))).dropped == "truncated"


def test_repetition_counts_grams_seen_before() -> None:
    assert repetition([1, 2, 3, 4, 5], 2) == 0.0
    assert repetition([1, 2, 1, 2, 1, 2], 2) == 1 - 2 / 5
    assert repetition([1], 2) == 0.0
    group = make_group([0.0, 1.0], repetition_2=[0.1, 0.9])
    assert only(judge(Repetition(max_share=0.5, ngram=2), group)).masked == {1: "repetition"}
    assert set(Repetition(ngram=2).taggers) == {"repetition_2"}


def test_duplicates_of_an_earlier_sample_are_masked_and_few_distinct_ones_drop_the_group() -> None:
    assert response_hash([1, 2]) == response_hash((1, 2)) != response_hash([12])
    group = make_group([0.0, 1.0, 1.0], response_hash=[7, 7, 8])
    assert only(judge(Duplicate(), group)).masked == {1: "duplicate"}
    assert only(judge(Duplicate(min_distinct=3), group)).dropped == "duplicate/few_distinct"


def test_rewards_and_siblings_can_be_asked_for_more_strictly() -> None:
    hole = make_group([0.0, 1.0, None])
    assert only(judge(FiniteReward(), hole)).dropped == "finite_reward/nan_reward"
    assert only(judge(FiniteReward(), make_group([0.0, 1.0, 1.0], failed=[2]))).dropped is None
    assert only(judge(MinLive(3), hole)).dropped == "min_live/failed_siblings"


def test_difficulty_looks_back_over_the_prompts_history_and_lets_a_share_through() -> None:
    seen = RunningStatistics()
    easy, hard, fresh = (make_group([0.0, 1.0], group=i) for i in range(3))
    for _ in range(2):
        seen.update([make_group([1.0, 1.0], group=0), make_group([0.0, 0.0], group=1)])
    context = make_context()
    context = type(context)(context.trainer_version, context.step, context.seed, seen)
    filter_ = Difficulty(0.1, 0.9, min_groups=2, explore=0.0)
    judged = judge(filter_, easy, hard, fresh, context=context)
    assert [j.dropped for j in judged] == ["difficulty/too_easy", "difficulty/too_hard", None]
    assert [j.dropped for j in judge(Difficulty(0.1, 0.9, explore=1.0), easy, context=context)] == [None]


def test_statistics_go_through_their_state() -> None:
    seen, restored = RunningStatistics(), RunningStatistics()
    seen.update([make_group([1.0, None, 0.0], group=3)])
    restored.load_state_dict(seen.state_dict())
    assert (restored.prompts[3].groups, restored.prompts[3].samples, restored.prompts[3].mean) == (1, 2, 0.5)
    assert restored.datasets["default"].mean == 0.5


def test_quota_holds_a_dataset_to_its_share_and_leaves_others_alone() -> None:
    batch = [make_group([0.0, 1.0], group=i, dataset="math" if i % 2 else "code") for i in range(40)]
    judged = judge(Quota({"math": 0.25}), *batch)
    kept = [j.group.dataset for j in judged if j.dropped is None]
    assert kept.count("code") == 20
    assert kept.count("math") / len(kept) <= 0.25 + 1 / len(kept)
    assert {j.dropped for j in judged} == {None, "quota/over_quota"}


def test_importance_outliers_are_masked_after_log_probabilities_on_top_of_earlier_masks() -> None:
    chain = Chain([Overlong(), ImportanceOutliers(max_log_ratio=2.0, max_mean_log_ratio=0.5)])
    assert chain.needs_logprobs
    [first] = chain.judge([make_group([0.0, 1.0, 0.0, 1.0], truncated=[0])], make_context())
    gaps = {"log_ratio_max": [None, 3.0, 1.0, 1.0], "log_ratio_mean": [None, 0.0, -0.6, 0.1]}
    stamped = Judgement(first.group.stamp(**gaps), None, "", first.masked, first.live, first.trained)
    [judged] = chain.judge_after_logprobs([stamped], make_context())
    assert judged.masked == {0: "overlong", 1: "importance_outliers", 2: "importance_outliers"}
    assert judged.trained == (3,)


def test_chains_nest_in_their_place() -> None:
    nested = {"name": "chain", "filters": [{"name": "length", "max_tokens": 3}, {"name": "zero_std"}]}
    chain = build_chain([{"name": "staleness"}, nested, {"name": "min_live", "samples": 2}], min_live=2)
    assert [f.name for f in chain.filters] == ["staleness", "length", "zero_std", "min_live"]


def test_c15_a_keep_rule_before_the_drop_rescues_what_another_loss_needs() -> None:
    """C15: order is the user's; the rescue stands before the drop that it lifts."""
    from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, keep, rescue
    from asyncrl.filters.builtin.zero_std import ZeroStd

    class KeepForSft(BaseRolloutFilter):
        requires = ("has_sft_loss",)

        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return rescue(["zero_std"]) if any(group.tag("has_sft_loss")) else keep()

    flat = [make_group([1.0, 1.0], group=i, has_sft_loss=[bool(i), False]) for i in range(2)]
    assert [j.dropped for j in Chain([KeepForSft(), ZeroStd()]).judge(flat, make_context())] == ["zero_std", None]
    assert [j.dropped for j in Chain([ZeroStd(), KeepForSft()]).judge(flat, make_context())] == ["zero_std"] * 2
