"""Judging in columns says what judging group by group says, for every built-in that can."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.filters import (
    BaseRolloutFilter,
    Chain,
    ColumnVerdict,
    FilterContext,
    GroupColumns,
    GroupView,
    Verdict,
    drop,
)
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.length import Length
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.filters.testing import TRAINER_VERSION, judge, make_context, make_group

VECTORISED: list[Callable[[], BaseRolloutFilter]] = [
    lambda: Staleness(max_age=1, max_age_by_dataset={"other": 3}),
    lambda: Staleness(max_mean_token_age=1.5),
    ZeroStd,
    lambda: Length(min_tokens=2, max_tokens=9),
    lambda: DynamicSampling(0.2, 0.8),
]

REWARDS = st.sampled_from([0.0, 1.0, 0.35, -2.5, float("nan"), float("inf"), None])


@st.composite
def groups(draw: st.DrawFn) -> list[GroupMeta]:
    size = draw(st.integers(2, 5))
    return [
        make_group(
            draw(st.lists(REWARDS, min_size=size, max_size=size)),
            group=i,
            version=TRAINER_VERSION - draw(st.integers(0, 4)),
            lengths=draw(st.lists(st.integers(0, 12), min_size=size, max_size=size)),
            failed=draw(st.lists(st.integers(0, size - 1), max_size=1)),
            dataset=draw(st.sampled_from(["default", "other"])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


def one_by_one(make: Callable[[], BaseRolloutFilter]) -> BaseRolloutFilter:
    class Plain(BaseRolloutFilter):
        requires = make().requires

        @property
        def name(self) -> str:
            return make().name

        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return make().judge(group, context)

    return Plain()


@pytest.mark.parametrize("make", VECTORISED)
def test_columns_and_single_groups_agree(make: Callable[[], BaseRolloutFilter]) -> None:
    @settings(deadline=None, max_examples=30)
    @given(groups())
    def agree(batch: list[GroupMeta]) -> None:
        assert make().judges_columns
        assert not one_by_one(make).judges_columns
        assert judge(make(), *batch) == judge(one_by_one(make), *batch)

    agree()


def test_a_subclass_with_its_own_judge_is_not_overruled_by_inherited_columns() -> None:
    class Stricter(ZeroStd):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return drop("never_good_enough")

    assert [j.dropped for j in judge(Stricter(), make_group([0.0, 1.0]))] == ["zero_std/never_good_enough"]


def test_reasons_are_counted_by_filter() -> None:
    chain = Chain([ZeroStd(), Length(max_tokens=5)])
    batch = [make_group([1.0, 1.0]), make_group([0.0, 1.0], group=1), make_group([0.0, 1.0], group=2, lengths=[1, 2])]
    verdicts = chain.judge_columns(batch, make_context())
    assert verdicts.counts() == {"zero_std": 1, "length/too_long": 1}
    assert (chain.stats["zero_std"].judged, dict(chain.stats["zero_std"].dropped)) == (3, {"zero_std": 1})
    assert (chain.stats["length"].judged, dict(chain.stats["length"].dropped)) == (2, {"length/too_long": 1})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda groups: ColumnVerdict(drops={"x": np.zeros(groups.n + 1, dtype=np.bool_)}), "must be bool of shape"),
        (lambda groups: ColumnVerdict(drops={"x": np.zeros(groups.n)}), "must be bool of shape"),
        (
            lambda groups: ColumnVerdict(masks={"x": (np.zeros(groups.n, dtype=np.bool_), True)}),
            "must be bool of shape",
        ),
        (
            lambda groups: ColumnVerdict(drops={"": np.zeros(groups.n, dtype=np.bool_)}),
            "a reason is a non-empty string",
        ),
        (lambda groups: None, "must return a ColumnVerdict"),
        (lambda groups: groups.live.__setitem__(0, False), "tried to change a tag"),
    ],
)
def test_a_column_answer_of_the_wrong_kind_is_named(answer: Callable[[GroupColumns], ColumnVerdict], says: str) -> None:
    class Wrong(BaseRolloutFilter):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            raise AssertionError("columns are judged at once")

        def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
            return answer(groups)

    with pytest.raises(FilterError, match=f"filter Wrong.*{says}"):
        judge(Wrong(), make_group([0.0, 1.0]))


@pytest.mark.parametrize("version", [True, 1.0, None, "1"])
def test_a_version_that_is_no_integer_is_an_error_in_columns_too(version: object) -> None:
    with pytest.raises(TagError, match=r"filter staleness.*version"):
        judge(Staleness(max_age=1), make_group([0.0, 1.0]).stamp(version=version))


def test_a_stamp_from_the_future_is_an_error_not_age_zero() -> None:
    with pytest.raises(TagError, match="newer than the trainer"):
        judge(Staleness(max_age=1), make_group([0.0, 1.0], version=TRAINER_VERSION + 1))
