"""What must hold between the trainer's options, and between them and others.

Each rule is a ValueError that names the options, their values and their range.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.configs.schema import RunConfig


def options_take_effect(config: "RunConfig") -> None:
    """An option that would change nothing is refused."""
    if config.trainer.fetch_policy != "auto" and config.trainer.replica_ranks == 1:
        raise ValueError(
            f"trainer.fetch_policy is {config.trainer.fetch_policy}; it must be auto: with tensor_parallel and "
            "pipeline_parallel 1 every rank holds a whole replica and reads for itself, so another policy would "
            "change nothing"
        )
    transport, folder = config.trainer.weight_transport, config.trainer.weight_folder
    if (transport == "folder") != (folder is not None):
        raise ValueError(
            f"trainer.weight_transport is {transport} and trainer.weight_folder {folder}; the transport folder "
            "needs a folder, and every other must have null"
        )


def ranks_divide(config: "RunConfig") -> None:
    """Ranks divide into replicas."""
    trainer = config.trainer
    if trainer.context_parallel > 1:
        raise ValueError(
            f"trainer.context_parallel is {trainer.context_parallel}; Megatron divides a sample over ranks only "
            "with Transformer Engine, which asyncrl does not use, so it must be 1"
        )
    if trainer.backend == "torch":
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(trainer, name) > 1:
                raise ValueError(
                    f"trainer.{name} is {getattr(trainer, name)} and trainer.backend torch, each of whose ranks "
                    f"holds a whole replica; {name} must be 1, or the backend megatron"
                )
    if trainer.ranks % trainer.replica_ranks:
        raise ValueError(
            f"trainer.ranks is {trainer.ranks}, trainer.tensor_parallel {trainer.tensor_parallel} and "
            f"trainer.pipeline_parallel {trainer.pipeline_parallel}; each replica takes {trainer.replica_ranks} "
            "ranks, so ranks must be a multiple of that"
        )
    if trainer.replicas % trainer.expert_parallel:
        raise ValueError(
            f"trainer.expert_parallel is {trainer.expert_parallel}, and {trainer.ranks} ranks hold "
            f"{trainer.replicas} replicas; it must divide their number"
        )
    if trainer.expert_parallel > 1 and trainer.sft_warm_up_steps and trainer.sft_warm_up_batch < trainer.replicas:
        raise ValueError(
            f"trainer.sft_warm_up_batch is {trainer.sft_warm_up_batch}, trainer.expert_parallel "
            f"{trainer.expert_parallel} and there are {trainer.replicas} replicas, each of which needs an example; "
            "the batch must be at least their number"
        )


def precision_agrees(config: "RunConfig") -> None:
    """Weights in bfloat16 are read in bfloat16."""
    if config.trainer.precision == "bf16_weights":
        if config.model.dtype != "bfloat16":
            raise ValueError(
                f"trainer.precision is bf16_weights and model.dtype {config.model.dtype}; dtype must be bfloat16, or "
                "precision autocast"
            )
        if config.lora.rank is not None:
            raise ValueError(
                f"trainer.precision is bf16_weights and lora.rank {config.lora.rank}; an adapter is added to float32 "
                "weights, so precision must be autocast, or rank null"
            )


def sharding_agrees(config: "RunConfig") -> None:
    """Shards have ranks to lie on."""
    trainer, sharding = config.trainer, config.trainer.sharding
    ranks, shard_ranks = trainer.ranks, trainer.shard_ranks
    if (sharding == "hybrid") != (shard_ranks is not None):
        raise ValueError(
            f"trainer.sharding is {sharding} and trainer.shard_ranks {shard_ranks}; hybrid needs a number of ranks "
            "that keep a model together, and with full or none shard_ranks must be null"
        )
    if shard_ranks is not None and (ranks % shard_ranks or not 1 < shard_ranks < ranks):
        raise ValueError(
            f"trainer.shard_ranks is {shard_ranks} and trainer.ranks {ranks}; shard_ranks must divide ranks, and "
            "be at least 2 and less than ranks (with all of them, sharding is full)"
        )
    if not trainer.is_sharded:
        if trainer.reshard_after_forward is not None:
            raise ValueError(
                f"trainer.reshard_after_forward is {str(trainer.reshard_after_forward).lower()} and trainer.sharding "
                "none, with which every rank keeps the whole model; it must be null, or sharding full or hybrid"
            )
        return
    if ranks == 1:
        raise ValueError(f"trainer.sharding is {sharding} and trainer.ranks 1; one rank has nobody to share with")
    if config.run.runtime == "local":
        raise ValueError(
            f"trainer.sharding is {sharding} and run.runtime local, in which all ranks are one process; sharding "
            "must be none, or runtime ray"
        )
    if config.lora.rank is not None:
        raise ValueError(
            f"trainer.sharding is {sharding} and lora.rank {config.lora.rank}; an adapter is merged into whole "
            "weights, so sharding must be none, or rank null"
        )


def learning_rate_agrees(config: "RunConfig") -> None:
    """A schedule has an end, after its warm-up."""
    trainer, steps = config.trainer, config.run.steps
    kind, total = trainer.lr_schedule, trainer.lr_total_steps
    if kind == "constant" and total is not None:
        raise ValueError(
            f"trainer.lr_total_steps is {total} and trainer.lr_schedule constant, which has no end; lr_total_steps "
            "must be null, or lr_schedule linear or cosine"
        )
    if kind != "constant" and total is None and steps is None:
        raise ValueError(
            f"trainer.lr_schedule is {kind}, and trainer.lr_total_steps and run.steps are null; one of them must "
            "say when the learning rate is lowest"
        )
    if total is not None and steps is not None and total < steps:
        raise ValueError(
            f"trainer.lr_total_steps is {total} and run.steps {steps}; lr_total_steps must be at least as many, or "
            "the last steps would hardly learn"
        )
    end = total or steps
    if end is not None and trainer.lr_warm_up_steps >= end:
        name = "run.steps" if total is None else "trainer.lr_total_steps"
        raise ValueError(
            f"trainer.lr_warm_up_steps is {trainer.lr_warm_up_steps} and {name} {end}; the warm-up must be shorter"
        )
    if trainer.decay_vectors and not trainer.weight_decay:
        raise ValueError(
            "trainer.decay_vectors is true and trainer.weight_decay 0, by which nothing decays; decay_vectors must "
            "be false, or weight_decay greater than 0"
        )


def lora_takes_effect(config: "RunConfig") -> None:
    """Options of an adapter need one."""
    lora, trainer = config.lora, config.trainer
    if lora.rank is None:
        for name, value, default in (("alpha", lora.alpha, None), ("target_modules", lora.target_modules, "auto")):
            if value != default:
                raise ValueError(
                    f"lora.{name} is {value!r} and lora.rank null, by which all weights are trained; "
                    f"rank must be a number, or {name} {default or 'null'}"
                )
    elif trainer.reference_kl and trainer.sft_warm_up_steps:
        raise ValueError(
            f"trainer.reference_kl is {trainer.reference_kl:g}, trainer.sft_warm_up_steps "
            f"{trainer.sft_warm_up_steps} and lora.rank {lora.rank}; with an adapter the reference is the model "
            "as it was loaded, not the warmed-up one. One of the first two must be 0"
        )


def batches_fit(config: "RunConfig") -> None:
    """A micro-batch holds the longest sample."""
    if config.trainer.longest_sample <= config.longest_response:
        multiple = f" in multiples of trainer.align {config.trainer.align}" if config.trainer.align > 1 else ""
        raise ValueError(
            f"trainer.micro_batch_tokens is {config.trainer.micro_batch_tokens}; it must hold a whole sample, "
            f"more than {config.longest_option} {config.longest_response}{multiple}"
        )
    if not config.trainer.balance and config.trainer.micro_batch_order != "costliest_first":
        raise ValueError(
            f"trainer.balance is false and trainer.micro_batch_order {config.trainer.micro_batch_order}; "
            "without balancing samples keep their order, so micro_batch_order must be costliest_first"
        )
    if config.trainer.forward_budget < config.trainer.micro_batch_tokens:
        raise ValueError(
            f"trainer.forward_tokens is {config.trainer.forward_tokens} and trainer.micro_batch_tokens "
            f"{config.trainer.micro_batch_tokens}; forward_tokens must be at least micro_batch_tokens, or null"
        )
