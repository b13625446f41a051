"""Drop or mask by response length, in tokens."""

from asyncrl.engine.records.group import RESPONSE_TOKENS, STATUS, TRUNCATED
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.verdict import Verdict, drop, keep, mask


class Length(BaseRolloutFilter):
    """Drop groups with a live response outside [min_tokens, max_tokens] (reasons `too_long`, `too_short`)."""

    name = "length"
    requires = (RESPONSE_TOKENS,)
    drop_reasons = ("too_long", "too_short")

    def __init__(self, min_tokens: int | None = None, max_tokens: int | None = None) -> None:
        if min_tokens is None and max_tokens is None:
            raise ValueError("give min_tokens or max_tokens")
        for name, limit in (("min_tokens", min_tokens), ("max_tokens", max_tokens)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}; it must be at least 0")
        if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
            raise ValueError(f"min_tokens is {min_tokens} and max_tokens {max_tokens}; min must be at most max")
        self._low = -1 if min_tokens is None else min_tokens
        self._high = float("inf") if max_tokens is None else max_tokens

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        lengths = [group.lengths[i] for i in group.live]
        if max(lengths) > self._high:
            return drop("too_long")
        return drop("too_short") if min(lengths) < self._low else keep()

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        low, high = groups.live_extremes(groups.lengths)
        too_long = high > self._high
        return ColumnVerdict(drops={"too_long": too_long, "too_short": (low < self._low) & ~too_long})


class Overlong(BaseRolloutFilter):
    """Mask samples that were cut at the length limit, or have at least `max_tokens` if given (reason `overlong`).

    Overlong filtering of DAPO (arXiv 2503.14476, §3.4): the reward of a cut response is noise. With `keep_reward` it
    still counts in the group's statistics.
    """

    name = "overlong"
    requires = (RESPONSE_TOKENS, STATUS)
    mask_reasons = ("overlong",)

    def __init__(self, max_tokens: int | None = None, keep_reward: bool = True) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        self._max_tokens = max_tokens
        self._keep_reward = keep_reward

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        statuses = group.tag(STATUS)
        cut = [
            i
            for i in group.trained
            if (statuses[i] == TRUNCATED if self._max_tokens is None else group.lengths[i] >= self._max_tokens)
        ]
        return mask(cut, "overlong", keep_reward=self._keep_reward) if cut else keep()


class Truncated(BaseRolloutFilter):
    """Drop groups in which more than `max_share` of the samples were cut at the length limit (reason `truncated`)."""

    name = "truncated"
    requires = (STATUS,)
    drop_reasons = ("truncated",)

    def __init__(self, max_share: float = 0.5) -> None:
        if not 0 <= max_share < 1:
            raise ValueError(f"max_share is {max_share}; it must be in [0, 1)")
        self._max_share = max_share

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        cut = sum(status == TRUNCATED for status in group.tag(STATUS))
        return drop("truncated") if cut / group.size > self._max_share else keep()
