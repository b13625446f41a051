"""The distance between a sample's log-probabilities under the trainer and those it was sampled with.

Tags of stage `after_logprobs`, per sample, over its response tokens: the largest |log π_trainer - log π_sampler|, and
the mean of log π_trainer - log π_sampler. None for a sample that is not trained.
"""

LOG_RATIO_MAX = "log_ratio_max"
LOG_RATIO_MEAN = "log_ratio_mean"
