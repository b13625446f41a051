"""What may change when a run is resumed."""

RESUMED = "the run that is resumed"
"""Where the values of a run that goes on come from, in messages."""

NOT_TAKEN = ("cluster.address", "cluster.environment")
"""Keys that a resumed run does not take from its folder, which may be another's: where it connects to, and which of
this process's variables go there."""

HARMLESS = (
    "run.runtime",
    "run.steps",
    "run.batches",
    "run.stop_at_reward",
    "run.alarm_window",
    "run.max_empty_batches",
    "run.directory",
    "run.record",
    "run.save_",
    "checkpoint.",
    "data_plane.",
    "cluster.",
    "supervision.",
    "task.epochs",
    "task.retire_after",
    "rollout.gate_timeout_s",
    "rollout.bias_warning",
    "evaluation.every",
    "evaluation.at_",
    "evaluation.device",
    "evaluation.timeout_s",
    "collector.count",
    "collector.servers",
    "collector.server_",
    "collector.weights_folder",
    "collector.threads",
    "collector.device",
    "collector.decode_samples",
    "collector.cache_gib",
    "collector.queue_timeout_s",
    "collector.group_timeout_s",
    "collector.put_timeout_s",
    "collector.score_",
    "collector.max_failures_in_a_row",
    "collector.on_error",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.fetch_policy",
    "trainer.shard",
    "trainer.threads",
    "trainer.device",
    "trainer.peak_flops",
    "trainer.step_timeout_s",
    "trainer.min_step_s",
    "trainer.publish_",
    "trainer.weight_transport",
    "trainer.weight_folder",
    "trainer.weight_delta",
)
"""Beginnings of keys. They decide neither what a group is nor what is learned from it, but where, for how long, and at
what pace. What an evaluation asks is not among them: the best model is kept by figures, which have to be comparable."""
