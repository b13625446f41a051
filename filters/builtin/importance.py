"""Filters on the distance between the trainer's policy and the one that sampled, after log-probabilities."""

from asyncrl.engine.records.gaps import LOG_RATIO_MAX, LOG_RATIO_MEAN
from asyncrl.filters.base import AFTER_LOGPROBS, BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.verdict import Verdict, keep, mask


class ImportanceOutliers(BaseRolloutFilter):
    """Mask samples whose log-probabilities differ too much (reason `importance_outliers`).

    `max_log_ratio` limits the largest |log π_trainer - log π_sampler| of a token. `max_mean_log_ratio` limits the
    absolute mean of the log-ratio over the response (the sequence-level error). NaN is over any limit. With
    `keep_reward` the rewards of masked samples still count.
    """

    name = "importance_outliers"
    stage = AFTER_LOGPROBS
    requires = (LOG_RATIO_MAX, LOG_RATIO_MEAN)
    mask_reasons = ("importance_outliers",)

    def __init__(
        self, max_log_ratio: float | None = 5.0, max_mean_log_ratio: float | None = None, keep_reward: bool = True
    ) -> None:
        if max_log_ratio is None and max_mean_log_ratio is None:
            raise ValueError("give max_log_ratio or max_mean_log_ratio")
        for name, limit in (("max_log_ratio", max_log_ratio), ("max_mean_log_ratio", max_mean_log_ratio)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit!r}; it must be above 0")
        self._max = float("inf") if max_log_ratio is None else max_log_ratio
        self._mean = float("inf") if max_mean_log_ratio is None else max_mean_log_ratio
        self._keep_reward = keep_reward

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        largest, means = group.tag(LOG_RATIO_MAX), group.tag(LOG_RATIO_MEAN)
        bad = [
            i
            for i in group.trained
            if largest[i] is not None and not (largest[i] <= self._max and abs(means[i]) <= self._mean)
        ]
        return mask(bad, "importance_outliers", keep_reward=self._keep_reward) if bad else keep()
