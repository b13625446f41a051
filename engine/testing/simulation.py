"""The real controller, collectors, front end and data plane around fakes, in virtual time."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from pydantic import ValidationError

from asyncrl.collectors.collector import Collector
from asyncrl.collectors.tasks import Task
from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import EVALUATION, PARTITION, Deployment
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import AnyEvent
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.model_saver import ModelSaver
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.simulate.virtual_loop import build_collectors, fake_evaluation, local_plane, run_controller
from asyncrl.engine.testing.audit import Audit
from asyncrl.engine.testing.fakes import FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.remote import DelayedActor, DelayedPlane, Delays, Process
from asyncrl.filters import BaseRolloutFilter, Chain, build_chain

Kind = TypeVar("Kind", bound=AnyEvent)

_LATE_S = 100.0


@dataclass(slots=True)
class Collected:
    """The events of a run, in order."""

    events: list[AnyEvent] = field(default_factory=list)

    def apply(self, event: AnyEvent) -> None:
        self.events.append(event)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run left: its ending, folds, events, and the keys still in the data plane."""

    config: RunConfig
    ending: Ending
    ledger: Ledger
    progress: Progress
    events: list[AnyEvent]
    keys_left: list[str]
    seconds: float
    generators: Sequence[FakeGenerator]
    successors: Mapping[str, Sequence[FakeGenerator]]
    ranks: Sequence[FakeRank]
    controller: Controller
    age_reasons: tuple[str, ...]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def audit(self) -> Audit:
        """What the events say when they are counted again."""
        return Audit.of(self.events)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a cluster that come and go, each with room for one more collector, or with one.

    One comes at each of `added_at`, and another collector can join that takes `start_s`. That of a collector is drained
    at `drained_at`, and ends so many seconds later; or is lost at `lost_at` with all that is on it.
    """

    added_at: Sequence[float] = ()
    start_s: float = 3.0
    drained_at: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lost_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def gone_at(self) -> dict[str, float]:
        """When the nodes of collectors end."""
        return {name: at + left_s for name, (at, left_s) in self.drained_at.items()} | dict(self.lost_at)


@dataclass(frozen=True, slots=True)
class Remote:
    """Puts actors and plane into processes of their own: how long calls and answers take, and who is killed when.

    A collector that died is replaced in `restart_s` seconds; None: never. `hangs`: who is killed only falls silent.
    With `nodes`, collectors join and leave.
    """

    actors: Delays = field(default_factory=Delays)
    plane: Delays = field(default_factory=Delays)
    killed_at: Mapping[str, Sequence[float]] = field(default_factory=dict)
    restart_s: float | None = None
    hangs: bool = False
    nodes: Nodes | None = None


class FakeRoster:
    """The deployment's roster. Collectors that join have the numbers after those of the beginning."""

    def __init__(self, nodes: Nodes, processes: "Processes", first: int) -> None:
        self._nodes = nodes
        self._processes = processes
        self._recruited = 0
        self._first = first
        self.dismissed: list[str] = []

    async def look(self) -> Mapping[str, float]:
        now, drained = virtual_clock(), self._nodes.drained_at
        return {name: max(0.0, at + left_s - now) for name, (at, left_s) in drained.items() if at <= now}

    async def recruit(self) -> Any:
        if sum(at <= virtual_clock() for at in self._nodes.added_at) <= self._recruited:
            return None
        name = f"collector{self._first + self._recruited}"
        self._recruited += 1
        return await self._processes.begin(name, self._nodes.start_s)

    def has_lost(self, name: str) -> bool:
        return self._nodes.lost_at.get(name, math.inf) <= virtual_clock()

    async def dismiss(self, name: str) -> None:
        self._processes.kill(name)
        self.dismissed.append(name)


class Processes:
    """The processes of one simulated world. `build` makes the collector of a name anew, for a restart."""

    def __init__(self, remote: Remote, tasks: TaskGroup, build: Callable[[str], Any]) -> None:
        self._remote = remote
        self._tasks = tasks
        self._build = build
        self._running: dict[str, Process] = {}
        for name, times in remote.killed_at.items():
            for at in times:
                tasks.start_soon(self._kill, name, at, remote.hangs)
        for name, at in remote.nodes.gone_at.items() if remote.nodes else ():
            tasks.start_soon(self._kill, name, at, False)

    def actor(self, actor: Any) -> Any:
        process = self._running[actor.name] = Process(actor.name, self._tasks, self._remote.actors)
        return DelayedActor(actor, process)

    def data_plane(self, plane: DataPlane) -> Any:
        return DelayedPlane(plane, Process("plane", self._tasks, self._remote.plane, in_order=False))

    async def restart(self, name: str) -> Any:
        """Be the deployment's restarter."""
        assert self._remote.restart_s is not None
        self._running[name].kill()
        return await self.begin(name, self._remote.restart_s)

    async def begin(self, name: str, start_s: float) -> Any:
        """Start a process that takes so long."""
        another = self.actor(self._build(name))
        await checkpoint()  # The process starts.
        await self._running[name].call("connect", partial(anyio.sleep, start_s))
        return another

    def kill(self, name: str) -> None:
        self._running[name].kill()

    async def _kill(self, name: str, at: float, hangs: bool) -> None:
        await anyio.sleep(at)
        if name in self._running:
            self._running[name].kill(hangs=hangs)


@cache
def _default() -> dict[str, Any]:
    return load("default").config.model_dump()


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
    given = {**small, **{path.replace("__", "."): value for path, value in values.items()}}
    tree = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in _default().items()}
    for path, value in given.items():
        section, dot, name = path.partition(".")
        if not dot:
            tree[section] = value
        elif isinstance(tree.get(section), dict):
            tree[section][name] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError:  # Slower, and with the message that a user would see.
        return load("default", [Override(path, value, "test") for path, value in given.items()]).config


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
    collector: type[Collector] = Collector,
    controller: type[Controller] = Controller,
    rank: type[FakeRank] = FakeRank,
    remote: Remote | None = None,
    evaluator: FakeGenerator | None = None,
    evaluation_task: Task | None = None,
    saver: Callable[[Progress], ModelSaver] | None = None,
) -> Outcome:
    """Run `config` in virtual time. `wrap` puts faults around the plane; `beside` runs with the controller.

    `collector`, `controller` and `rank` are the classes to run, for a test that plants a fault in one. With
    `remote`, actors and plane are called as Ray calls them; without it, a call that is given up ends. `evaluator`
    generates for evaluations of `evaluation_task`, if the configuration asks for them, and `saver` saves models.
    """
    used_task = task or FakeTask()
    used_generators = list(generators or [FakeGenerator()])
    successors: defaultdict[str, list[FakeGenerator]] = defaultdict(list)

    async def main() -> Outcome:
        async with anyio.create_task_group() as world:
            outcome = await in_world(world)
            world.cancel_scope.cancel()
        return outcome

    async def in_world(tasks: TaskGroup) -> Outcome:
        store = wrap(await local_plane(config))

        def successor(name: str) -> Collector:
            """Build a collector anew, around a generator like the first of the name, or like the first of all."""
            index = int(name.removeprefix("collector"))
            like = used_generators[index if index < len(used_generators) else 0]
            successors[name].append(like.anew())
            return build([successors[name][-1]] * (index + 1))[index]

        processes = None if remote is None else Processes(remote, tasks, successor)
        plane = store if processes is None else processes.data_plane(store)
        chain = (
            build_chain(config.filters, min_live=config.rollout.min_live)
            if filters is None
            else Chain(filters, min_live=config.rollout.min_live)
        )
        build = partial(
            build_collectors,
            config,
            task=used_task,
            tokenizer=CharTokenizer(),
            plane=plane,
            collector=collector,
            taggers=chain.taggers,
        )
        collectors: Sequence[Any] = build(used_generators)
        ranks = [
            rank(f"rank{i}", plane, seconds=rank_seconds, fail=rank_fail if i == 0 else lambda _: None, gap=rank_gap)
            for i in range(config.trainer.replicas)
        ]
        handles: Sequence[Any] = ranks
        if processes is not None:
            collectors = [processes.actor(actor) for actor in collectors]
            handles = [processes.actor(actor) for actor in ranks]
            await checkpoint()  # The processes start.
        ledger, progress, collected = Ledger(), Progress(config.run.reward_window), Collected()
        restarter = None if remote is None or remote.restart_s is None else processes
        deployment = Deployment(plane, collectors, handles, used_task.prompts(), [], restarter=restarter)
        if processes is not None and remote is not None and remote.nodes is not None:
            deployment = replace(deployment, roster=FakeRoster(remote.nodes, processes, len(used_generators)))
        if config.evaluation.every is not None:
            generator, asked = evaluator or FakeGenerator(), evaluation_task or used_task
            part = await fake_evaluation(config, generator, task=asked, plane=plane, source=ranks[0])
            deployment = replace(deployment, evaluation=part)
        made, ending = await run_controller(
            config,
            deployment,
            chain=chain,
            # The events come first, so that they hold what a fold refused.
            folds=[collected, ledger, progress],
            progress=progress,
            controller=controller,
            beside=beside,
            saver=None if saver is None else saver(progress),
        )
        seconds = virtual_clock()
        partitions = (PARTITION,) if deployment.evaluation is None else (PARTITION, EVALUATION)
        # What was called and given up comes late, and must find nothing to do.
        await anyio.sleep(0.0 if remote is None else _LATE_S)
        return Outcome(
            config=config,
            ending=ending,
            ledger=ledger,
            progress=progress,
            events=collected.events,
            keys_left=[key for name in partitions for key in await store.keys(name)],
            seconds=seconds,
            generators=used_generators,
            successors=successors,
            ranks=ranks,
            controller=made,
            age_reasons=chain.age_reasons,
        )

    return run_virtual(main)
