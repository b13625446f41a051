"""Sample until the batch is full of groups that teach something (DAPO, arXiv 2503.14476, §3.2).

In the chain this filter drops groups whose mean accuracy is outside a band. Its presence also turns on refill: a batch
is then `groups_per_step` groups *kept*, and the front end judges more groups within a budget of attempts. One attempt
is `groups_per_step` groups judged. Example: with 16 groups per step and 10 attempts, at most 160 groups are judged.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl.engine.records.group import REWARD
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.verdict import Verdict, drop, keep

OnExhausted = Literal["error", "train_partial", "wait"]

_NOISE = 1e-9


@dataclass(frozen=True, slots=True)
class Refill:
    """How many attempts a batch has, and what happens after them."""

    max_attempts: int
    on_exhausted: OnExhausted


class DynamicSampling(BaseRolloutFilter):
    """Drop groups whose mean of `tag` over live samples is outside [low, high] (reason `out_of_band`).

    A mean that misses a bound by a relative 1e-9 or less is inside. A batch has `max_attempts` attempts. After them
    `on_exhausted` says what happens: `error` ends the run, `train_partial` trains the groups that were kept, `wait`
    goes on with a warning at each further attempt.
    """

    name = "dynamic_sampling"
    drop_reasons = ("out_of_band",)

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        tag: str = REWARD,
        max_attempts: int = 10,
        on_exhausted: OnExhausted = "error",
    ) -> None:
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts!r}; it must be an integer of at least 1")
        if on_exhausted not in get_args(OnExhausted):
            raise ValueError(f"on_exhausted is {on_exhausted!r}; it must be one of {get_args(OnExhausted)}")
        for name, bound in (("low", low), ("high", high)):
            if bound is not None and (isinstance(bound, bool | str) or not math.isfinite(bound)):
                raise ValueError(f"{name} is {bound!r}; it must be a finite number, or null for no bound")
        if low is not None and high is not None and low > high:
            raise ValueError(f"low is {low} and high {high}; low must be at most high")
        # In floats the mean of eight rewards of 0.1 is under 0.1, and depends on the order of the sum. Without this
        # tolerance a group on the bound would be dropped by chance.
        self._low = -math.inf if low is None else low - _NOISE * abs(low)
        self._high = math.inf if high is None else high + _NOISE * abs(high)
        self._tag = tag
        self.requires = (tag,)  # type: ignore[misc]
        self.refill = Refill(max_attempts, on_exhausted)

    @property
    def _is_open(self) -> bool:
        return self._low == -math.inf and self._high == math.inf

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        if self._is_open:
            return keep()
        values = group.live_values(self._tag)
        mean = sum(values) / len(values)
        return keep() if self._low <= mean <= self._high else drop("out_of_band")

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        if self._is_open:
            return ColumnVerdict()
        means = groups.live_means(groups.live_numbers(self._tag))
        return ColumnVerdict(drops={"out_of_band": (means < self._low) | (means > self._high)})
