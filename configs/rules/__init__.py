"""What must hold between options of several sections."""

from asyncrl.configs.rules import rollout, task, trainer

RULES = (
    trainer.options_take_effect,
    rollout.collectors_may_come_and_go,
    trainer.ranks_divide,
    trainer.precision_agrees,
    trainer.sharding_agrees,
    rollout.outage_ends_before_groups,
    task.environment_agrees,
    task.saves_agree,
    trainer.learning_rate_agrees,
    trainer.lora_takes_effect,
    task.data_agree,
    task.evaluation_agrees,
    rollout.groups_fit,
    task.heads_divide,
    trainer.batches_fit,
    rollout.rows_fit,
    task.names_are_given,
)
"""In the order in which they are checked; the first that does not hold is told."""
