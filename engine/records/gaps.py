"""How far a sample's log-probabilities under the trainer are from those it was sampled with.

Tags of stage `after_logprobs`, per sample, None for one that is not trained: the largest size of
log π_trainer - log π_sampler over its response tokens, and the mean over them.
"""

LOG_RATIO_MAX = "log_ratio_max"
LOG_RATIO_MEAN = "log_ratio_mean"
