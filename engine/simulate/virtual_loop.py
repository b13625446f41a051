"""The real controller, collectors, front end and data plane in one process, on the virtual clock."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.generators.base import Generator
from asyncrl.collectors.outcome import Rules
from asyncrl.collectors.scoring import AsyncScorer, InPlaceScorer, Scorer
from asyncrl.collectors.tasks import Task
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import EVALUATION, EVALUATOR, PARTITION, CopySource, Deployment, EvaluationPart
from asyncrl.engine.events.log import EventLog, Fold
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.lifecycle.evaluation import evaluation_config, evaluation_partition
from asyncrl.engine.lifecycle.parts import train_partition
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.model_saver import ModelSaver
from asyncrl.engine.model.tokenizer import CharTokenizer, Tokenizer
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.weights.base import InProcess
from asyncrl.filters import Chain
from asyncrl.filters.taggers import Tagger


def build_collectors(
    config: RunConfig,
    generators: Sequence[Generator],
    *,
    task: Task,
    tokenizer: Tokenizer,
    plane: DataPlane,
    collector: type[Collector] = Collector,
    taggers: Mapping[str, Tagger] | None = None,
) -> list[Collector]:
    """Return a real collector for each generator."""
    return [
        collector(
            f"collector{i}",
            CollectorSettings.of(config, PARTITION),
            generator=generator,
            scorer=in_place_scorer(task),
            tokenizer=tokenizer,
            plane=plane,
            transport=InProcess(),
            taggers=taggers,
        )
        for i, generator in enumerate(generators)
    ]


async def fake_evaluation(
    config: RunConfig, generator: Generator, *, task: Task, plane: DataPlane, source: CopySource
) -> EvaluationPart:
    """Return a real collector around a generator, which evaluates the task's prompts."""
    await plane.register(evaluation_partition(config))
    prompts = task.prompts()
    collector = Collector(
        EVALUATOR,
        CollectorSettings.of(evaluation_config(config, prompts), EVALUATION),
        generator=generator,
        scorer=in_place_scorer(task),
        tokenizer=CharTokenizer(),
        plane=plane,
        transport=InProcess(),
    )
    return EvaluationPart(collector, source, InProcess(), prompts)


async def local_plane(config: RunConfig, kind: Callable[..., LocalPlane] = LocalPlane) -> LocalPlane:
    """Make the in-process plane of a configuration, on virtual time, with its partition."""
    data_plane = config.data_plane
    plane = kind(clock=virtual_clock, capacity_rows=data_plane.capacity_rows, lease_s=data_plane.lease_s)
    await plane.register(train_partition(config))
    return plane


async def run_controller(
    config: RunConfig,
    deployment: Deployment,
    *,
    chain: Chain,
    folds: Sequence[Fold],
    progress: Progress,
    controller: type[Controller] = Controller,
    beside: Callable[[Controller], Any] | None = None,
    saver: ModelSaver | None = None,
) -> tuple[Controller, Ending]:
    """Run the controller to its ending on the event loop's clock; `beside` runs concurrently."""
    events = EventLog(clock=virtual_clock, wall=virtual_clock, folds=folds)
    made = controller(
        config, deployment, chain=chain, events=events, progress=progress, clock=virtual_clock, saver=saver
    )
    async with anyio.create_task_group() as tasks:
        if beside is not None:
            tasks.start_soon(beside, made)
        ending = await made.run()
        tasks.cancel_scope.cancel()
    return made, ending


def in_place_scorer(task: Task) -> Scorer:
    """Return a scorer without a time limit: in virtual time, wall-clock limits would not be repeatable."""
    rules = Rules(type(task).__name__)
    return AsyncScorer(task, rules) if inspect.iscoroutinefunction(task.score) else InPlaceScorer(task, rules)
