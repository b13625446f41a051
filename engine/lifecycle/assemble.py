"""The deployment of a run, put together of the parts that a runtime has started."""

from collections.abc import Sequence

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import CollectorHandle, Deployment
from asyncrl.engine.lifecycle.parts import cost_model, run_tokenizer, tokenized
from asyncrl.engine.lifecycle.replica import Member, Replica
from asyncrl.trainers.parallel import Parallel


def assemble(
    config: RunConfig,
    prepared: PreparedTask,
    *,
    plane: DataPlane,
    collectors: Sequence[CollectorHandle],
    ranks: Sequence[Member],
) -> Deployment:
    """Return what the controller works with: the first replica is the one that saves and whose weights are evaluated.

    `ranks` are the processes that train.
    """
    cost = cost_model(config)
    replicas = replicas_of(config, ranks)
    return Deployment(
        plane=plane,
        collectors=collectors,
        ranks=replicas,
        prompts=prepared.source,
        examples=tokenized(prepared.examples, run_tokenizer(config)),
        cost=cost.flops if cost else None,
        holder=replicas[0],
        states=ranks,
        processes=ranks,
    )


def replicas_of(config: RunConfig, ranks: Sequence[Member]) -> Sequence[Member | Replica]:
    """Return the processes that train, those that hold a replica together as one."""
    parallel = Parallel.of(config.trainer)
    if config.trainer.is_sharded:
        # Each has a part of the batch, as whole replicas have; rank 0 alone gathers weights.
        return [Replica(ranks[:1], ranks[1 : config.trainer.model_ranks]), *ranks[1:]]
    if config.trainer.replica_ranks == config.trainer.expert_parallel == 1:
        return ranks
    return [
        Replica([ranks[rank] for rank in parallel.replica(data)], [ranks[rank] for rank in parallel.experts(data)])
        for data in range(parallel.data)
    ]
