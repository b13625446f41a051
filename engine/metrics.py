"""Every metric name of a training step, `area/what_unit`. Always present, zero when idle."""

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/learning_rate"
RATIO_MEAN = "train/ratio_mean"
CLIPPED_FRACTION = "train/clipped_fraction"
KL_MEAN = "train/behaviour_kl_mean"
# Of the policy's distribution at the sampling temperature, in nats, over the trained tokens' positions.
ENTROPY_MEAN = "train/entropy_mean"
TOKENS = "train/tokens"
MICRO_BATCHES = "train/micro_batches"
# Cost of the costliest rank over the mean, as planned and as timed; 1 is even.
PLANNED_IMBALANCE = "train/planned_rank_imbalance"
MEASURED_IMBALANCE = "train/measured_rank_imbalance"
FLOPS = "train/model_flops"
RANKS = "train/ranks"
FILLER_MICRO_BATCHES = "train/filler_micro_batches"
GROUPS_KEPT = "batch/groups_kept"
GROUPS_JUDGED = "batch/groups_judged"
AGE_MEAN = "staleness/trained_age_mean_versions"
AGE_MAX = "staleness/trained_age_max_versions"
# 0 while it is not known.
LENGTH_RATIO = "staleness/fresh_length_ratio"
PUBLISH_LAG = "staleness/publish_lag_versions"
RUN_AHEAD = "flow/run_ahead_groups"
POLL_HITS = "flow/slow_poll_hits"
TRAINER_WAIT = "flow/trainer_wait_s"
# With cluster.time_slicing: until the generators slept and the ranks were awake.
DEVICE_WAIT = "flow/device_wait_s"
# Of the last version that was published before the step ended, as in the log's `published`; sizes in bytes.
PUBLISH_SECONDS = "publish/total_s"
PUBLISH_GATHER = "publish/gather_s"
PUBLISH_TRANSFER = "publish/transfer_s"
PUBLISH_STAGE = "publish/stage_s"
PUBLISH_PAUSE = "publish/pause_s"
PUBLISH_BYTES = "publish/weights_bytes"
PUBLISH_SENT_BYTES = "publish/sent_bytes"
# The trainer has been shown mostly short answers of late: 1, else 0 (rollout.bias_warning).
LENGTH_BIAS_WARNING = "staleness/length_bias_warning"
RECENT_LENGTH_RATIO = "staleness/recent_fresh_length_ratio"
TOKENS_LOST_TO_AGE = "staleness/lost_to_age_tokens"
PROMPTS_LOST_HALF = "staleness/mostly_lost_prompts"
# What collectors put and ranks read since the last step: `data/<put or get>_<path>_bytes`, and the same with `_per_s`,
# by the seconds that the calls took. A path is shared memory (mapping it takes no time: bytes come as they are used) or
# the store, near or far: of the same node or not. Mooncake's store does not say, so it counts as far.
PUT = "data/put"
GET = "data/get"
# Of the bytes that the ranks read, those of their own nodes.
NEAR_SHARE = "data/get_near_share"
# Of the collectors' engines since the last step, as of their last put notices. Means over the collectors: share of the
# time with something to decode and no pause, share of the time in pauses, share of the cache in use at the notice.
# Sums: requests (samples) that decoded and that waited at the notice, and tokens. 0 where an engine does not tell.
ENGINE_BUSY = "engine/busy_share"
ENGINE_PAUSED = "engine/paused_share"
ENGINE_CACHE = "engine/cache_used_share"
ENGINE_RUNNING = "engine/running_requests"
ENGINE_WAITING = "engine/waiting_requests"
ENGINE_TOKEN_RATE = "engine/tokens_per_s"
# Over the last run.alarm_window batches that ended: shares of samples, of samples that the filters kept, of groups
# and of batches; and how many alarms are on.
UNTRAINED_FRACTION = "alarms/untrained_sample_fraction"
OVER_BUDGET_FRACTION = "alarms/over_budget_sample_fraction"
OVER_BUDGET_PROMPTS = "alarms/over_budget_prompts"
IDENTICAL_FRACTION = "alarms/identical_group_fraction"
EMPTY_BATCH_FRACTION = "alarms/empty_batch_fraction"
ALARMS_RAISED = "alarms/raised"
# |mean ratio - 1| of a step in which nothing is older than the weights; 0 for any other.
AGE_0_RATIO_ERROR = "alarms/age_0_ratio_error"
# By part of the reward functions, `reward/<part>_mean`: over the samples written since the batch before.
REWARD = "reward"
# Samples so far whose score failed, with reward.on_failure in its place.
ON_FAILURE = "reward/on_failure_samples"
# What a filter has done since the run began: `filters/<filter>/<figure>`, and for the counts by reason
# `filters/<filter>/<figure>/<reason>`. A batch without survivors is not a step, so these count up.
FILTERS = "filters"
JUDGED_GROUPS = "judged_groups"
RESCUED_GROUPS = "rescued_groups"
DROPPED_GROUPS = "dropped_groups"
MASKED_SAMPLES = "masked_samples"
JUDGING = "judging_s"
# Of the last evaluation that ended, 0 before there is one; and how many ended, and were left out or failed, so far.
EVALUATION_VERSION = "evaluation/version"
EVALUATION_PASS_AT_1 = "evaluation/pass_at_1"
EVALUATION_REWARD = "evaluation/reward_mean"
EVALUATIONS = "evaluation/ended"
EVALUATIONS_FAILED = "evaluation/failed"
# Of importance weights towards the sampler: as they are, as truncated, and how many were (decoupled objective).
WEIGHT_MEAN = "train/importance_weight_mean"
USED_WEIGHT_MEAN = "train/used_importance_weight_mean"
TRUNCATED_FRACTION = "train/truncated_weight_fraction"
# KL(policy ‖ reference), the k3 estimate (trainer.reference_kl).
REFERENCE_KL_MEAN = "train/reference_kl_mean"
UPDATES = "train/optimizer_updates"
# Shares: of computed cost that fillers are, and of positions that hold no token.
FILLER_FRACTION = "train/filler_fraction"
PADDING_FRACTION = "train/padding_fraction"
# Of the ranks' time, the share in which they wait for the slowest one.
BUBBLE_FRACTION = "train/bubble_fraction"
# Share of the devices' theoretical FLOPs a second that the model's FLOPs are, over the slowest rank's time.
PEAK_FRACTION = "train/peak_flops_fraction"
# Of the slowest rank: micro-batches alone, as measured and as predicted before the step; waiting for rows.
RANK_SECONDS = "train/slowest_rank_s"
PREDICTED_SECONDS = "train/predicted_slowest_rank_s"
ROW_WAIT = "train/row_wait_s"
# Mean over ranks of |predicted - measured| / measured seconds.
PREDICTION_ERROR = "train/prediction_error_fraction"
# The stages before training: log-probabilities, filters that judge by them, reference.
FORWARD_SECONDS = "train/forward_stages_s"
# Differ from run to run of one seed.
TIMED_FRACTIONS = (MEASURED_IMBALANCE, BUBBLE_FRACTION, PEAK_FRACTION, PREDICTION_ERROR, ENGINE_BUSY, ENGINE_PAUSED)
