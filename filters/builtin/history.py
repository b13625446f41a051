"""Filters that look back: at the difficulty of a prompt so far, and at the share of a dataset so far."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.engine.records.group import DATASET, PROMPT
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.verdict import Verdict, drop, keep


class Difficulty(BaseRolloutFilter):
    """Drop groups of prompts whose mean reward over the run so far is outside [low, high].

    Reasons: `too_hard` and `too_easy`. A prompt is judged after `min_groups` groups. A share `explore` of the groups
    that would be dropped passes, because the mean of a prompt whose groups are all dropped could never change. The
    default band keeps all prompts with rewards in [0, 1], so give `low`, `high` or both.
    """

    name = "difficulty"
    requires = (PROMPT,)
    drop_reasons = ("too_hard", "too_easy")

    def __init__(self, low: float = 0.0, high: float = 1.0, min_groups: int = 2, explore: float = 0.1) -> None:
        if not low <= high:
            raise ValueError(f"low is {low} and high {high}; both must be numbers, and low at most high")
        if min_groups < 1:
            raise ValueError(f"min_groups is {min_groups}; it must be at least 1")
        if not 0 <= explore <= 1:
            raise ValueError(f"explore is {explore}; it must be in [0, 1]")
        self._low = low
        self._high = high
        self._min_groups = min_groups
        self._explore = explore

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        tally = context.statistics.prompts.get(group.meta.prompt)
        if tally is None or tally.mean is None or tally.groups < self._min_groups:
            return keep()
        reason = "too_hard" if tally.mean < self._low else "too_easy" if tally.mean > self._high else ""
        if not reason or context.rng(group).random() < self._explore:
            return keep()
        return drop(reason)


class Quota(BaseRolloutFilter):
    """Drop groups of a dataset that has reached its share of the groups that pass (reason `over_quota`).

    `shares` maps a dataset to its largest share, in (0, 1]; other datasets have no limit. The share is taken over the
    last `window` groups that passed. Put this filter last: a group that a later filter drops still counts.
    Example: with shares {code: 0.25} and 8 groups in the window, a third group of `code` is dropped.
    """

    name = "quota"
    requires = (DATASET,)
    drop_reasons = ("over_quota",)

    def __init__(self, shares: Mapping[str, float], window: int = 256) -> None:
        bad = {name: share for name, share in shares.items() if not 0 < share <= 1}
        if bad:
            raise ValueError(f"shares are {bad}; each must be in (0, 1]")
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        self._shares = dict(shares)
        self._window = window
        self._passed: deque[str] = deque(maxlen=window)

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        dataset = group.meta.dataset
        share = self._shares.get(dataset)
        if share is not None:
            # A full window loses its oldest group when this one passes, so that group must not count.
            full = len(self._passed) == self._window
            size = len(self._passed) + (not full)
            others = self._passed.count(dataset) - (full and self._passed[0] == dataset)
            if others + 1 > max(1.0, share * size):
                return drop("over_quota")
        self._passed.append(dataset)
        return keep()

    def state_dict(self) -> dict[str, Any]:
        return {"passed": list(self._passed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._passed = deque(state["passed"], maxlen=self._window)
