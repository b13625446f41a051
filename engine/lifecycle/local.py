"""`runtime: local`: the whole run in this process, on one event loop, in the same order for the same seed."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

import torch

from asyncrl.collectors.collector import Collector
from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.call_in import CallIn, call_here
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import Deployment, EvaluationPart
from asyncrl.engine.lifecycle.assemble import assemble
from asyncrl.engine.lifecycle.checks import warn_of_settings
from asyncrl.engine.lifecycle.evaluation import build_evaluator, evaluation_config, evaluation_partition
from asyncrl.engine.lifecycle.parts import (
    all_taggers,
    build_collector,
    build_rank,
    collector_model,
    rank_model,
    train_partition,
    with_slots,
)
from asyncrl.engine.lifecycle.scorers import local_scorer
from asyncrl.engine.lifecycle.transports import Transports, choose_way, weight_directory
from asyncrl.engine.model.device import choose_device
from asyncrl.engine.weights.base import InProcess
from asyncrl.filters.taggers import Tagger
from asyncrl.trainers.links import Links
from asyncrl.trainers.reducer import Gloo, Meeting, MeetingPoint


@asynccontextmanager
async def local_deployment(
    config: RunConfig,
    prepared: PreparedTask,
    *,
    taggers: Mapping[str, Tagger] = MappingProxyType({}),
    call_in: CallIn = call_here,
) -> AsyncIterator[Deployment]:
    """Build everything in this process, on the first GPU if GPUs are used; nothing outlives the context.

    `taggers` are those of filters that are not in the configuration. What is not async scores by `call_in`.
    """
    task, config = prepared.task, with_slots(config, prepared.prompts)
    tagging = all_taggers(config, taggers)
    torch.set_num_threads(config.trainer.threads)
    plane = LocalPlane(
        clock=time.monotonic,
        capacity_rows=config.data_plane.capacity_rows,
        lease_s=config.data_plane.lease_s,
    )
    warn_of_settings(config)
    await plane.register(train_partition(config, task.extras))
    way = choose_way(config)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(weight_directory(config, way))
        links = await stack.enter_async_context(_links(config))
        transports = Transports.of(config, way, directory)
        trains_on, collects_on = (choose_device(part.device, 0) for part in (config.trainer, config.collector))
        collectors = [
            build_collector(
                config,
                i,
                model=collector_model(config, 0),
                scorer=local_scorer(config, prepared, taggers=tagging, call_in=call_in),
                plane=plane,
                transport=transports.build(f"collector{i}", collects_on, blocking=in_place),
                blocking=in_place,
                taggers=tagging,
            )
            for i in range(config.collector.count)
        ]
        ranks = [
            build_rank(
                config,
                i,
                model=rank_model(config, 0),
                plane=plane,
                links=links[i],
                transport=transports.build(f"rank{i}", trains_on, blocking=in_place),
                blocking=in_place,
                extras=task.extras,
            )
            for i in range(config.trainer.ranks)
        ]
        evaluation = None
        if config.evaluation.every is not None:
            evaluator = await local_evaluator(config, prepared, plane=plane, call_in=call_in)
            evaluation = EvaluationPart(evaluator, ranks[0], InProcess(), prepared.evaluation)
        try:
            made = assemble(config, prepared, plane=plane, collectors=collectors, ranks=ranks)
            yield replace(made, evaluation=evaluation)
        finally:
            await plane.close()


@asynccontextmanager
async def _links(config: RunConfig) -> AsyncIterator[list[Links]]:
    """Yield what links each rank to the others. Megatron's groups are of a process, which has one rank of it."""
    trainer = config.trainer
    if trainer.backend == "torch":
        meeting = Meeting(trainer.ranks, trainer.step_timeout_s)
        yield [Links(meeting.member(i)) for i in range(trainer.ranks)]
        return
    point = MeetingPoint()
    gloo = Gloo(rank=0, ranks=1, meeting=point.address, timeout_s=trainer.step_timeout_s, blocking=in_place)
    await gloo.join()
    try:
        yield [Links(gloo)]
    finally:
        gloo.leave()


async def local_evaluator(config: RunConfig, prepared: PreparedTask, *, plane: DataPlane, call_in: CallIn) -> Collector:
    """Return a collector in this process that evaluates, and register the partition that it writes to."""
    await plane.register(evaluation_partition(config, prepared.task.extras))
    used = evaluation_config(config, prepared.evaluation)
    return build_evaluator(
        used,
        model=collector_model(used, 0),
        scorer=local_scorer(used, prepared, taggers={}, call_in=call_in),
        plane=plane,
        transport=InProcess(),
        blocking=in_place,
    )
