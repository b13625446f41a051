"""Filters on rewards and on the number of live samples."""

from asyncrl.engine.records.group import REWARD, STATUS
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.verdict import Verdict, drop, keep


class FiniteReward(BaseRolloutFilter):
    """Drop groups in which a generated sample has no finite reward (reason `nan_reward`).

    Without this filter such a sample is masked and the rest of its group is trained.
    """

    name = "finite_reward"
    requires = (REWARD, STATUS)
    drop_reasons = ("nan_reward",)

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("nan_reward") if group.without_reward else keep()


class MinLive(BaseRolloutFilter):
    """Drop groups with fewer than `samples` live samples (reason `failed_siblings`).

    `rollout.min_live` always applies too, so a smaller number here has no effect.
    """

    name = "min_live"
    requires = (REWARD, STATUS)
    drop_reasons = ("failed_siblings",)

    def __init__(self, samples: int) -> None:
        if samples < 2:
            raise ValueError(f"samples is {samples}; a relative advantage needs at least 2")
        self._samples = samples

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("failed_siblings") if len(group.live) < self._samples else keep()
