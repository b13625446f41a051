"""check_filter passes every built-in and finds each of the planted faults."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.engine.records import GroupMeta
from asyncrl.filters import (
    BaseRolloutFilter,
    ColumnVerdict,
    FilterContext,
    GroupColumns,
    GroupView,
    Verdict,
    drop,
    keep,
    mask,
)
from asyncrl.filters.load import BUILT_IN
from asyncrl.filters.testing import FilterContractError, check_filter, judge

NEEDS: Mapping[str, dict[str, Any]] = {
    "length": {"max_tokens": 100},
    "min_live": {"samples": 3},
    "quota": {"shares": {"default": 0.5}},
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_keeps_the_contract(name: str) -> None:
    check_filter(lambda: BUILT_IN[name](**NEEDS.get(name, {})))


class Good(BaseRolloutFilter):
    """Drops long groups; the faulty ones below differ in one point each."""

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("long") if max(group.lengths) > 10 else keep()


class ChangesTags(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        cast("dict[str, Any]", group.meta.tags)["reward"] = []
        return keep()


class ForgetsAGroup(Good):
    def judge_many(self, groups: Sequence[GroupView], context: FilterContext) -> list[Verdict]:
        return [keep()] * (len(groups) - 1) if groups else []


class SaysTrue(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return cast("Verdict", True)


class MasksAStranger(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return mask([group.size], "stranger", keep_reward=True)


class CrashesOnNan(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("low") if sum(int(r or 0) for r in group.rewards) < 0 else keep()


class RollsDice(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return keep() if random.random() < 0.5 else drop("unlucky")


class ForgetsItsState(Good):
    def __init__(self) -> None:
        self.seen = 0

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        self.seen += 1
        return drop("late") if self.seen > 12 else keep()


class KeepsStateNoJsonCanHold(ForgetsItsState):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {self.seen}}


class LoadsNothing(ForgetsItsState):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class NumbersItsReasons(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop(f"longest_{max(group.lengths)}") if max(group.lengths) > 10 else keep()


class ColumnsDisagree(Good):
    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        return ColumnVerdict(drops={"long": np.zeros(groups.n, dtype=np.bool_)})


class MasksOthersInColumns(Good):
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return mask([0], "first", keep_reward=True)

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        flags = np.zeros((groups.n, groups.size), dtype=np.bool_)
        flags[:, 1] = True
        return ColumnVerdict(masks={"first": (flags, True)})


class TakesTheRewardInColumns(MasksOthersInColumns):
    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        flags = np.zeros((groups.n, groups.size), dtype=np.bool_)
        flags[:, 0] = True
        return ColumnVerdict(masks={"first": (flags, False)})


class GivesAnotherReason(Good):
    drop_reasons = ("longer",)


class DeclaresAnAgeReasonAlone(Good):
    age_reasons = ("ancient",)


class DeclaresText(Good):
    mask_reasons = cast("tuple[str, ...]", "long")


class IgnoresAMissingTag(Good):
    requires = ("mood",)

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return keep()


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        (ChangesTags, "tried to change a tag"),
        (ForgetsAGroup, "verdicts for"),
        (SaysTrue, "returned True"),
        (MasksAStranger, "masked samples"),
        (CrashesOnNan, "raised ValueError|raised OverflowError"),
        (RollsDice, "judged the same groups differently"),
        (ForgetsItsState, "state_dict leaves something out"),
        (KeepsStateNoJsonCanHold, "does not go through JSON"),
        (LoadsNothing, "cannot load what"),
        (NumbersItsReasons, "different reasons"),
        (ColumnsDisagree, "judge_columns gives None"),
        (MasksOthersInColumns, r"judge_columns gives .*\(masked\), judge gives"),
        (TakesTheRewardInColumns, r"judge_columns gives .*\(live\), judge gives"),
        (GivesAnotherReason, r"gave \['GivesAnotherReason/long'\]; drop_reasons is \('longer',\)"),
        (DeclaresAnAgeReasonAlone, r"age_reasons names \['ancient'\], and neither drop_reasons nor mask_reasons does"),
        (DeclaresText, "mask_reasons is 'long'; it must be a tuple of strings"),
        (IgnoresAMissingTag, "needs tag 'mood'"),
    ],
)
def test_a_planted_fault_is_found(faulty: type[BaseRolloutFilter], says: str) -> None:
    with pytest.raises(FilterContractError, match=says):
        check_filter(faulty)


def test_a_good_filter_passes_and_tags_can_be_given() -> None:
    check_filter(Good)

    class Moody(Good):
        requires = ("mood",)

    check_filter(Moody, tags=lambda group: {"mood": [0.5] * group.size})


def test_the_fixtures_are_installed_with_asyncrl(
    rollout_group: Callable[..., GroupMeta], check_rollout_filter: Callable[..., None]
) -> None:
    check_rollout_filter(Good)
    assert [j.dropped for j in judge(Good(), rollout_group([0.0, 1.0], lengths=[3, 11]))] == ["Good/long"]
