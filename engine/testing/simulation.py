"""The real controller, collectors, front end and data plane around fakes, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrl.collectors.collector import Collector
from asyncrl.collectors.tasks import Task
from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.controller import Controller
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.ending import Ending
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import AnyEvent
from asyncrl.engine.lifecycle.base import PARTITION, World
from asyncrl.engine.lifecycle.parts import train_partition
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.offload import in_place
from asyncrl.engine.testing.audit import Audit
from asyncrl.engine.testing.fakes import FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.weights.base import InProcess
from asyncrl.filters import BaseRolloutFilter, Chain, build_chain

Kind = TypeVar("Kind", bound=AnyEvent)


@dataclass(slots=True)
class _Collected:
    events: list[AnyEvent] = field(default_factory=list)

    def apply(self, event: AnyEvent) -> None:
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run left: its ending, folds, events, and the keys still in the data plane."""

    ending: Ending
    ledger: Ledger
    progress: Progress
    events: list[AnyEvent]
    keys_left: list[str]
    seconds: float
    ranks: Sequence[FakeRank]
    controller: Controller

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def audit(self) -> Audit:
        """What the events say when they are counted again."""
        return Audit.of(self.events)


def simulated_config(**values: Any) -> RunConfig:
    """Load the default preset with overrides; `rollout__group_size=4` sets rollout.group_size."""
    small = {
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "trainer.ranks": 1,
        "run.batches": None,
        "run.steps": 5,
        "supervision.starve_timeout_s": 1000.0,
    }
    given = {path.replace("__", "."): value for path, value in values.items()}
    overrides = [Override(path, value, "test") for path, value in {**small, **given}.items()]
    return load("default", overrides).config


def simulate(
    config: RunConfig,
    *,
    task: Task | None = None,
    generators: Sequence[FakeGenerator] | None = None,
    rank_seconds: Callable[[int], float] = lambda _: 1.0,
    rank_fail: Callable[[int], None] = lambda _: None,
    rank_gap: Callable[[str], tuple[float, float]] = lambda _: (0.0, 0.0),
    filters: Sequence[BaseRolloutFilter] | None = None,
    wrap: Callable[[DataPlane], DataPlane] = lambda plane: plane,
    beside: Callable[[Controller], Any] | None = None,
) -> Outcome:
    """Run `config` in virtual time. `wrap` puts faults around the plane; `beside` runs with the controller."""
    used_task = task or FakeTask()
    used_generators = list(generators or [FakeGenerator()])

    async def main() -> Outcome:
        import anyio

        plane = wrap(
            LocalPlane(
                clock=virtual_clock,
                capacity_rows=config.data_plane.capacity_rows,
                lease_s=config.data_plane.lease_s,
            )
        )
        await plane.register(train_partition(config))
        chain = (
            build_chain(config.filters, min_live=config.rollout.min_live)
            if filters is None
            else Chain(filters, min_live=config.rollout.min_live)
        )
        collectors = [
            Collector(
                f"collector{i}",
                generator=generator,
                task=used_task,
                tokenizer=CharTokenizer(),
                plane=plane,
                partition=PARTITION,
                transport=InProcess(),
                offload=in_place,
                temperature=1.0,
                max_new_tokens=config.rollout.max_new_tokens,
                group_timeout_s=config.collector.group_timeout_s,
                put_timeout_s=config.collector.put_timeout_s,
                taggers=chain.taggers,
            )
            for i, generator in enumerate(used_generators)
        ]
        ranks = [
            FakeRank(
                f"rank{i}", plane, seconds=rank_seconds, fail=rank_fail if i == 0 else lambda _: None, gap=rank_gap
            )
            for i in range(config.trainer.ranks)
        ]
        world = World(plane, collectors, ranks, used_task.prompts(), [])
        ledger, progress, collected = Ledger(), Progress(config.run.reward_window), _Collected()
        events = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[ledger, progress, collected])
        controller = Controller(config, world, chain=chain, events=events, progress=progress, clock=virtual_clock)
        async with anyio.create_task_group() as tasks:
            if beside is not None:
                tasks.start_soon(beside, controller)
            ending = await controller.run()
            tasks.cancel_scope.cancel()
        return Outcome(
            ending=ending,
            ledger=ledger,
            progress=progress,
            events=collected.events,
            keys_left=await plane.keys(PARTITION),
            seconds=virtual_clock(),
            ranks=ranks,
            controller=controller,
        )

    return run_virtual(main)
