"""Generation within whole runs, for bench_generation.py: what a synchronous step costs beyond its parts, and how busy
the engine is where steps overlap.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import anyio
import torch

import asyncrl
from asyncrl.collectors.collector import sample_seed
from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.native import NativeEngine
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.flat import flatten
from asyncrl.collectors.generators.base import Completion, Generator, GroupRequest
from asyncrl.collectors.tasks import Reward
from asyncrl.collectors.tasks.load import load_task
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import AnyEvent, Dispatched, Published, StepEnded, StepStarted
from asyncrl.engine.lifecycle.parts import (
    build_generator,
    build_rank,
    build_run_model,
    cost_model,
    run_tokenizer,
    train_partition,
    with_slots,
)
from asyncrl.engine.metrics import ENGINE_BUSY, TRAINER_WAIT
from asyncrl.engine.records import Grant
from asyncrl.engine.records.work import SampleWork, TrainWork
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.fan_out import plan_batch
from asyncrl.trainers.links import Links

_WARM_STEPS = 3
"""Steps of a run before the first one that counts: processes start, and code runs for the first time."""
_SYNCHRONOUS = {
    "rollout.max_staleness": 0,
    "rollout.stale_mode": "drop",
    "rollout.groups_per_step": 16,
    "rollout.group_size": 16,
    "collector.decode_samples": 256,
    "filters": [{"name": "staleness"}],
    # The weights stay as they are, so the same samples come out when they are generated alone.
    "trainer.learning_rate": 1e-12,
}


def sync_ratio(steps: int) -> dict[str, Any]:
    """Return what a step of a run at S = 0 takes, over its generation and its training, each timed alone here.

    Medians over `steps` steps of 16 groups of 16: in the run from the end of a step to that of the next; alone, the
    same prompts and seeds with the same weights, in this process, on one thread as in the run.
    """
    config = asyncrl.load_config("long_tail", {**_SYNCHRONOUS, "run.batches": steps + _WARM_STEPS})
    events = _events_of(config)
    seconds = _step_seconds(events)
    dispatched = {event.group: event for event in events if isinstance(event, Dispatched)}
    batches = [[dispatched[group] for group in event.groups] for event in events if isinstance(event, StepStarted)]
    alone = anyio.run(_alone, config, batches)[_WARM_STEPS:]
    generation, training = (statistics.median(column) for column in zip(*alone, strict=True))
    step = statistics.median(seconds)
    return {
        "sync_ratio": round(step / (generation + training), 3),
        "sync_step_s": round(step, 3),
        "sync_generation_alone_s": round(generation, 3),
        "sync_training_alone_s": round(training, 3),
    }


def busy_share(steps: int) -> dict[str, Any]:
    """Return of the preset `long_tail` at S = 2 the engine's busy share, the trainer's wait, and an update's pause.

    Beside it, under the same kind of load in this process: an update's pause, and what draining, swapping and resuming
    takes, medians.
    """
    config = asyncrl.load_config("long_tail", {"run.batches": steps + _WARM_STEPS})
    events = _events_of(config)
    ended = [event for event in events if isinstance(event, StepEnded)]
    seconds = _step_seconds(events)
    busy_s = sum(s * event.metrics[ENGINE_BUSY] for s, event in zip(seconds, ended[_WARM_STEPS:], strict=True))
    waited_s = sum(event.metrics[TRAINER_WAIT] for event in ended[_WARM_STEPS:])
    pauses = [event.pause_s for event in events if isinstance(event, Published) and event.pause_s is not None]
    return {
        "busy_share": round(busy_s / sum(seconds), 4),
        "busy_run_trainer_wait_share": round(waited_s / sum(seconds), 3),
        "busy_run_pause_ms": round(1000 * statistics.median(pauses), 3),
        **anyio.run(_swaps, config),
    }


async def _swaps(config: RunConfig, times: int = 9) -> dict[str, float]:
    torch.set_num_threads(config.collector.threads)
    model, tokenizer, rollout = build_run_model(config), run_tokenizer(config), config.rollout
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    length = rollout.max_new_tokens + 2
    engine = NativeEngine(
        model, NativeSettings(config.collector.decode_samples, length, cache_bytes=2**30), blocking=in_thread
    )
    sampling = Sampling(rollout.max_new_tokens, stop_ids=(tokenizer.eos_id,))
    prompt, seeds = tuple(tokenizer.encode("7>")), count()

    async def ask() -> None:
        """Keep one row busy."""
        while True:
            seed = next(seeds)
            async for _ in engine.generate(Request(str(seed), prompt, sampling, seed, stream=False)):
                pass

    pauses, stops = [], []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        for _ in range(2 * config.collector.decode_samples):
            tasks.start_soon(ask)
        for version in range(1, 2 * times, 2):
            await anyio.sleep(0.3)
            pauses.append((await engine.update_weights(version, state)).pause_s)
            await anyio.sleep(0.3)
            started = time.perf_counter()
            await engine.pause("drain")
            await engine.update_weights(version + 1, state)
            await engine.resume()
            stops.append(time.perf_counter() - started)
        tasks.cancel_scope.cancel()
    return {
        "busy_load_pause_ms": round(1000 * statistics.median(pauses), 3),
        "busy_load_stop_the_world_ms": round(1000 * statistics.median(stops), 1),
    }


def _events_of(config: RunConfig) -> list[AnyEvent]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        asyncrl.run(config, folder)
        return list(read_events(folder / "events.jsonl"))


def _step_seconds(events: Sequence[AnyEvent]) -> list[float]:
    """Return for each step that counts the seconds from the end of the step before it."""
    ends = [event.t for event in events if isinstance(event, StepEnded)]
    return [after - before for before, after in pairwise(ends)][_WARM_STEPS - 1 :]


async def _alone(config: RunConfig, batches: Sequence[Sequence[Dispatched]]) -> list[tuple[float, float]]:
    """Return seconds of generation and of training, for each batch."""
    torch.set_num_threads(config.trainer.threads)
    prompts = load_task(config.task.name, config.task.options).prompts()
    config = with_slots(config, prompts)
    plane = LocalPlane()
    await plane.register(train_partition(config))
    transport = InProcess()
    rank = build_rank(
        config,
        0,
        model=build_run_model(config),
        plane=plane,
        links=Links(),
        transport=transport,
        blocking=in_thread,
    )
    generator = build_generator(config, 0, build_run_model(config), run_tokenizer(config), blocking=in_thread)
    by_id = {prompt.id: prompt for prompt in prompts}
    out = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generator.run)
        for step, batch in enumerate(batches, start=1):
            grants = [Grant(one.group, by_id[one.prompt], one.size, one.seed) for one in batch]
            started = time.perf_counter()
            completions = await _generate(config, generator, grants)
            generated = time.perf_counter()
            work = await _put(config, plane, completions, grants, step=step)
            ready = time.perf_counter()
            await rank.train(work)
            out.append((generated - started, time.perf_counter() - ready))
        tasks.cancel_scope.cancel()
    return out


async def _generate(
    config: RunConfig, generator: Generator, grants: Sequence[Grant]
) -> Mapping[int, Sequence[Completion]]:
    found: dict[int, Sequence[Completion]] = {}
    tokenizer = run_tokenizer(config)

    async def one(grant: Grant) -> None:
        found[grant.group] = await generator.generate(
            GroupRequest(
                prompt_ids=tuple(tokenizer.encode(grant.prompt.text)),
                seeds=tuple(sample_seed(grant.seed, grant.group, i) for i in range(grant.size)),
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                batch=grants[0].group,
                peers=len(grants),
            )
        )

    async with anyio.create_task_group() as tasks:
        for grant in grants:
            tasks.start_soon(one, grant)
    return found


async def _put(
    config: RunConfig,
    plane: LocalPlane,
    completions: Mapping[int, Sequence[Completion]],
    grants: Sequence[Grant],
    *,
    step: int,
) -> TrainWork:
    """Put groups into the plane, and return a step's work on them by the run's own planner."""
    samples: dict[str, SampleWork] = {}
    tokenizer, cost = run_tokenizer(config), cost_model(config)
    for grant in grants:
        ids = tokenizer.encode(grant.prompt.text)
        group, columns = flatten(grant, 0, ids, completions[grant.group], [Reward(0.0)] * grant.size, {})
        await plane.put(PARTITION, group, columns)
        for key, tokens in zip(group.keys, group.response_tokens, strict=True):
            samples[key] = SampleWork(key, len(ids), tokens, advantage=1.0)
    plan = plan_batch(
        {key: sample.prompt_tokens + sample.response_tokens for key, sample in samples.items()},
        ranks=1,
        budget_tokens=config.trainer.micro_batch_tokens,
        cost=cost.flops if cost else None,
    )
    total = sum(sample.response_tokens for sample in samples.values())
    return TrainWork(step=step, micro_batches=plan.ranks[0], samples=samples, total_tokens=total, pad_to=0)
