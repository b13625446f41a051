"""Drop groups whose rewards do not differ: they give no gradient (DAPO, arXiv 2503.14476, eq. 11)."""

import numpy as np

from asyncrl.engine.records.group import REWARD
from asyncrl.engine.records.spread import RELATIVE_TOLERANCE, is_flat
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.verdict import Verdict, drop, keep


class ZeroStd(BaseRolloutFilter):
    """Drop groups whose live samples all have the same `tag` (reason `zero_std`).

    Values are the same if they differ by at most `relative_tolerance` times the largest absolute value, so float
    noise does not count as a difference. Use a smaller tolerance for small differences on top of a large offset.
    `tag` is the reward, or any numeric tag such as a named part of the reward.
    """

    name = "zero_std"
    drop_reasons = ("zero_std",)

    def __init__(self, tag: str = REWARD, relative_tolerance: float = RELATIVE_TOLERANCE) -> None:
        if not 0 <= relative_tolerance < 1:
            raise ValueError(f"relative_tolerance is {relative_tolerance!r}; it must be in [0, 1)")
        self._tag = tag
        self._relative_tolerance = relative_tolerance
        self.requires = (tag,)  # type: ignore[misc]

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        flat = is_flat(group.live_values(self._tag), self._relative_tolerance)
        return drop("zero_std") if flat else keep()

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        low, high = groups.live_extremes(groups.live_numbers(self._tag))
        with np.errstate(invalid="ignore", over="ignore"):
            flat = high - low <= self._relative_tolerance * np.maximum(np.abs(low), np.abs(high))
        return ColumnVerdict(drops={"zero_std": flat})
