"""One simulated run: the real controller, front end, collectors and plane, on the virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.deployment import Deployment
from asyncrl.engine.events.log import Fold
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import SCHEMA, RunStarted
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.simulate.decoding import groups_at_once, loads_beside
from asyncrl.engine.simulate.profile import Profile
from asyncrl.engine.simulate.timeline import Timeline
from asyncrl.engine.simulate.virtual_loop import build_collectors, local_plane, run_controller
from asyncrl.engine.simulate.world import (
    PendingSamples,
    SimulatedGenerator,
    SimulatedPlane,
    SimulatedRank,
    SimulatedTask,
    SimulatedTokenizer,
)
from asyncrl.filters import build_chain


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result of a simulated run: its figures, and how it ended."""

    figures: dict[str, Any]
    ending: Ending


def predict(config: RunConfig, profile: Profile, *, slots: int = 0, folds: Sequence[Fold] = ()) -> Prediction:
    """Simulate a run. `slots` is the number of groups that a generator works on at once (0: as configured).

    The same configuration, profile and seed give the same figures. `folds` see every event.
    """
    seed = config.run.seed
    chain = build_chain(config.filters, min_live=config.rollout.min_live)
    timeline, progress = Timeline(), Progress(config.run.reward_window)
    started = RunStarted(schema=SCHEMA, config=config.model_dump(), software={}, age_reasons=chain.age_reasons)
    for fold in (timeline, progress):
        fold.apply(started)

    async def main() -> Ending:
        pending = PendingSamples()
        task = SimulatedTask(profile, pending)
        plane = await local_plane(config, partial(SimulatedPlane, profile, seed))
        generators = [
            SimulatedGenerator(
                i,
                profile,
                pending,
                seed=seed,
                slots=slots or _slots(config, batched=profile.batched),
                in_flight_updates=config.rollout.stale_mode == "tokens",
                loads_beside=loads_beside(config),
                sliced=config.cluster.time_slicing is not None,
            )
            for i in range(config.collector.count)
        ]
        collectors = build_collectors(
            config,
            generators,
            task=task,
            tokenizer=SimulatedTokenizer(profile),
            plane=plane,
            taggers=chain.taggers,
        )
        replicas = config.trainer.replicas
        ranks = [SimulatedRank(f"rank{i}", profile, replicas, seed) for i in range(replicas)]
        _, ending = await run_controller(
            config,
            Deployment(plane, collectors, ranks, task.prompts(), []),
            chain=chain,
            folds=[progress, timeline, *folds],
            progress=progress,
        )
        return ending

    ending = run_virtual(main)
    return Prediction(timeline.summary(), ending)


def _slots(config: RunConfig, *, batched: bool) -> int:
    """Return how many groups a generator works on at once: a decode batch, or all of run-ahead."""
    return groups_at_once(config) if batched else config.run_ahead_groups
