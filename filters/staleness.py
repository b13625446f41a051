"""Drop groups older than a limit stricter than the run's own bound.

The front end's bound on age always holds; this filter only tightens it, for all groups or for
some datasets. Without parameters it never drops more than the bound.
"""

from collections.abc import Mapping

from asyncrl.engine.records.group import DATASET, VERSION
from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.verdict import Verdict, drop, keep


class Staleness(BaseRolloutFilter):
    """Drop (reason `stale`) when V minus the oldest version is over `max_age`, in versions.

    `max_age_by_dataset` overrides `max_age` for the datasets that it names.
    """

    requires = (VERSION, DATASET)

    def __init__(self, max_age: int | None = None, max_age_by_dataset: Mapping[str, int] | None = None) -> None:
        limits = {"max_age": max_age, **(max_age_by_dataset or {})}
        for name, limit in limits.items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise ValueError(f"{name} is {limit!r}; it must be an integer of at least 0")
        self._max_age = max_age
        self._by_dataset = dict(max_age_by_dataset or {})

    @property
    def name(self) -> str:
        return "staleness"

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        age = group.meta.age(context.trainer_version)
        limit = self._by_dataset.get(group.meta.dataset, self._max_age)
        return drop("stale") if limit is not None and age > limit else keep()
