"""Filters on rewards and on which siblings are left."""

from asyncrl.engine.records.group import REWARD, STATUS
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.verdict import Verdict, drop, keep


class FiniteReward(BaseRolloutFilter):
    """Drop (reason `nan_reward`) whole groups in which a generated sample has no finite reward.

    Without this filter such samples are masked and their siblings go on.
    """

    requires = (REWARD, STATUS)
    drop_reasons = ("nan_reward",)

    @property
    def name(self) -> str:
        return "finite_reward"

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("nan_reward") if group.without_reward else keep()


class MinLive(BaseRolloutFilter):
    """Drop (reason `failed_siblings`) groups with fewer than `samples` live ones.

    The run's own `rollout.min_live` always holds; this only asks for more.
    """

    requires = (REWARD, STATUS)
    drop_reasons = ("failed_siblings",)

    def __init__(self, samples: int) -> None:
        if samples < 2:
            raise ValueError(f"samples is {samples}; a relative advantage needs at least 2")
        self._samples = samples

    @property
    def name(self) -> str:
        return "min_live"

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("failed_siblings") if len(group.live) < self._samples else keep()
