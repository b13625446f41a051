"""Drop groups over a limit on age that is stricter than the run's own bound.

The front end's bound on age always applies. This filter tightens it, for all groups or for some datasets. Without
parameters it drops nothing beyond the bound.
"""

from collections.abc import Mapping

import numpy as np

from asyncrl.engine.records.group import DATASET, VERSION
from asyncrl.engine.records.spans import mean_token_ages
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.verdict import Verdict, drop, keep


class Staleness(BaseRolloutFilter):
    """Drop groups whose age, V minus their oldest version, is over `max_age` versions (reason `stale`).

    `max_age_by_dataset` overrides `max_age` for the datasets that it names. `max_mean_token_age` drops groups whose
    tokens are older on average (reason `stale_tokens`). If the generator reports spans, each token counts with the
    version that produced it. Example: V is 9, and a response has 6 tokens of version 7 and 2 of version 9. Its age is
    2, and the mean age of its tokens is 1.5.
    """

    name = "staleness"
    requires = (VERSION, DATASET)
    drop_reasons = ("stale", "stale_tokens")
    age_reasons = drop_reasons

    def __init__(
        self,
        max_age: int | None = None,
        max_age_by_dataset: Mapping[str, int] | None = None,
        max_mean_token_age: float | None = None,
    ) -> None:
        limits = {"max_age": max_age, **(max_age_by_dataset or {})}
        for name, limit in limits.items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise ValueError(f"{name} is {limit!r}; it must be an integer of at least 0")
        if max_mean_token_age is not None and not max_mean_token_age >= 0:
            raise ValueError(f"max_mean_token_age is {max_mean_token_age}; it must be at least 0")
        self._max_age = max_age
        self._by_dataset = dict(max_age_by_dataset or {})
        self._max_mean_token_age = max_mean_token_age

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        age = group.meta.age(context.trainer_version)
        limit = self._by_dataset.get(group.meta.dataset, self._max_age)
        if limit is not None and age > limit:
            return drop("stale")
        if self._max_mean_token_age is not None:
            ages = mean_token_ages(group.meta, context.trainer_version)
            live = [ages[i] for i in group.live]
            if sum(live) / len(live) > self._max_mean_token_age:
                return drop("stale_tokens")
        return keep()

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        ages = context.trainer_version - groups.versions()
        if (ages < 0).any():
            groups.groups[int(np.argmin(ages))].age(context.trainer_version)
        limits = np.full(groups.n, np.inf if self._max_age is None else self._max_age)
        if self._by_dataset:
            known = [self._by_dataset.get(group.dataset, self._max_age) for group in groups.groups]
            limits = np.array([np.inf if limit is None else limit for limit in known])
        stale = ages > limits
        drops = {"stale": stale}
        if self._max_mean_token_age is not None:
            token_ages = np.array([mean_token_ages(g, context.trainer_version) for g in groups.groups])
            drops["stale_tokens"] = ~stale & (groups.live_means(token_ages) > self._max_mean_token_age)
        return ColumnVerdict(drops=drops)
