"""A random schedule of one run: its configuration, and what time, failures and deaths its parts bring."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, cast

import anyio
import structlog

from asyncrl.collectors.collector import Collector
from asyncrl.collectors.tasks import Reward
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.events.types import CollectorAdded, CollectorLeft, Published
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.testing.conformance.invariants import violations
from asyncrl.engine.testing.conformance.spanning import SpanningGenerator
from asyncrl.engine.testing.conformance.watch import WatchedPlane
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.remote import Delays
from asyncrl.engine.testing.simulation import Nodes, Outcome, Remote, simulate, simulated_config

Wrap = Callable[[DataPlane], DataPlane]

_LONGEST_S = 20_000.0
_PUBLISH_S = 20.0
_RESTART_S = 3.0


class Death(RuntimeError):
    """What a schedule kills an actor with."""


@dataclass(slots=True)
class _Mortal(FakeGenerator):
    """A generator whose process dies at `dies_at` seconds."""

    dies_at: float = math.inf

    async def run(self) -> None:
        await anyio.sleep(self.dies_at)
        raise Death(f"at {self.dies_at:g} s")


@dataclass(slots=True)
class _MortalSpanning(SpanningGenerator):
    dies_at: float = math.inf

    async def run(self) -> None:
        await anyio.sleep(self.dies_at)
        raise Death(f"at {self.dies_at:g} s")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run; lists repeat from the start. `poll_s` is the slow poll; infinite times never come.

    Each collector is `slower` than the one before it. `nodes` come and go, with up to `most_collectors`.
    """

    staleness: int = 1
    lag: int | None = None
    groups: int = 2
    size: int = 2
    collectors: int = 1
    ranks: int = 1
    refill: str | None = None
    attempts: int = 2
    seconds: Sequence[float] = (1.0,)
    lengths: Sequence[int] = (2,)
    failing_calls: Sequence[bool] = (False,)
    step_seconds: Sequence[float] = (1.0,)
    rewards: Sequence[Any] = (0.0, 1.0)
    slow_publishes: Sequence[float] = (0.0,)
    bad_publishes: AbstractSet[int] = frozenset()
    plane_seconds: Sequence[float] = (0.0,)
    plane_answers: Sequence[float] = (0.0,)
    call_seconds: Sequence[float] = (0.0,)
    answer_seconds: Sequence[float] = (0.0,)
    capacity: int | None = None
    epochs: int = 2
    prompts: int = 6
    seed: int = 0
    stale_mode: Literal["drop", "gate", "tokens"] = "drop"
    pacing: bool = False
    cancel_stale: bool = False
    requeue_tries: int = 0
    dies_at: float = math.inf
    rank_dies_at_step: int = 0
    interrupt_at: float = math.inf
    killed: str = ""
    killed_at: float = math.inf
    killed_again_s: float = math.inf
    hangs: bool = False
    restarts: int = 3
    poll_s: float = 5.0
    steps: int = 12
    batches: int = 25
    slower: float = 1.0
    nodes: Nodes | None = None
    most_collectors: int | None = None

    @classmethod
    def draw(cls, rng: random.Random) -> "Schedule":
        """Draw a schedule, small enough that thousands run in a minute."""

        def some(choices: list[Any], most: int) -> tuple[Any, ...]:
            return tuple(rng.choice(choices) for _ in range(rng.randint(1, most)))

        return cls(
            staleness=rng.randint(0, 3),
            lag=rng.choice([None, 0, 1, 2, 3]),
            groups=rng.randint(1, 3),
            size=rng.randint(2, 4),
            collectors=rng.randint(1, 2),
            ranks=rng.randint(1, 2),
            refill=rng.choice([None, None, "error", "train_partial", "wait"]),
            attempts=rng.randint(1, 3),
            seconds=some([0.0, 0.1, 1.0, 1.0, 1.0, 2.5, 7.0, 30.0, HANG_S], 7),
            lengths=some([2, 2, 3, 7], 4),
            failing_calls=some([False, False, False, False, True], 5),
            step_seconds=some([0.0, 0.5, 1.0, 4.0], 4),
            rewards=some([0.0, 1.0, 0.35, 0.0, 1.0, 0.7, 0.2, math.nan, None, math.inf, -math.inf, "raise"], 17),
            slow_publishes=some([0.0, 0.0, 1.0, 6.0, 6.0, 30.0], 4),
            bad_publishes=frozenset(rng.sample(range(12), rng.choice([0, 0, 1, 3]))),
            plane_seconds=some([0.0, 0.0, 0.0, 0.2], 5),
            plane_answers=some([0.0, 0.0, 0.0, 0.2], 5),
            call_seconds=some([0.0, 0.0, 0.0, 0.1, 0.7], 5),
            answer_seconds=some([0.0, 0.0, 0.0, 0.1, 0.7], 5),
            capacity=rng.choice([None, 0, 1, 2]),
            epochs=rng.randint(1, 3),
            prompts=rng.randint(2, 12),
            seed=rng.randint(0, 3),
            stale_mode=rng.choice(["drop", "drop", "gate", "tokens"]),
            pacing=rng.random() < 0.25,
            cancel_stale=rng.random() < 0.25,
            requeue_tries=rng.choice([0, 0, 1, 2]),
            dies_at=rng.choice([math.inf] * 9 + [rng.choice([0.0, 0.5, 3.0, 20.0])]),
            rank_dies_at_step=rng.choice([0] * 9 + [rng.randint(1, 4)]),
            interrupt_at=rng.choice([math.inf] * 9 + [rng.choice([0.0, 0.5, 3.0, 20.0])]),
            killed=rng.choice(["collector0", "collector1", "rank0", "rank1"]),
            killed_at=rng.choice([math.inf] * 11 + [rng.choice([0.0, 0.5, 3.0, 20.0])]),
            steps=rng.randint(1, 9),
            batches=12,
            slower=rng.choice([1.0, 1.0, 10.0]),
            killed_again_s=rng.choice([math.inf, 0.5, 2.0, 20.0]),
            hangs=rng.random() < 0.3,
            restarts=rng.choice([0, 1, 3, 3]),
        )

    def run(
        self,
        *,
        collector: type[Collector] = Collector,
        controller: type[Controller] = Controller,
        rank: type[FakeRank] = FakeRank,
        wrap: Wrap = lambda plane: plane,
    ) -> "Run":
        """Run it; the clock is virtual, the order one for one schedule. Classes and `wrap` may hold planted faults."""
        watched: list[WatchedPlane] = []

        def around(plane: DataPlane) -> DataPlane:
            watched.append(WatchedPlane(wrap(plane), virtual_clock))
            return cast("DataPlane", watched[0])

        with structlog.testing.capture_logs():
            outcome = simulate(
                self.config,
                task=FakeTask(self.prompts, self._reward),
                generators=[self._generator(i) for i in range(self.collectors)],
                rank_seconds=lambda step: self.step_seconds[step % len(self.step_seconds)],
                rank_fail=self._fail_rank,
                wrap=around,
                beside=self._interrupt,
                collector=collector,
                controller=controller,
                rank=rank,
                remote=Remote(
                    actors=Delays(self.call_seconds, self.answer_seconds),
                    plane=Delays(self.plane_seconds, self.plane_answers),
                    killed_at={self.killed: [at for at in self._kills if math.isfinite(at)]},
                    restart_s=_RESTART_S,
                    hangs=self.hangs,
                    nodes=self.nodes,
                ),
            )
        return Run(self, outcome, watched[0])

    @property
    def config(self) -> RunConfig:
        limit = (self.staleness + 1) * self.groups
        filters: list[Mapping[str, Any]] = [{"name": "staleness"}, {"name": "zero_std"}]
        if self.refill:
            filters.append({"name": "dynamic_sampling", "max_attempts": self.attempts, "on_exhausted": self.refill})
        return simulated_config(
            run__seed=self.seed,
            run__steps=self.steps,
            run__batches=self.batches,
            task__epochs=self.epochs,
            rollout__max_staleness=self.staleness,
            rollout__max_publish_lag=None if self.lag is None else min(self.lag, self.staleness),
            rollout__groups_per_step=self.groups,
            rollout__group_size=self.size,
            rollout__max_new_tokens=8,
            rollout__stale_mode=self.stale_mode,
            rollout__gate_timeout_s=100.0,
            rollout__pacing=self.pacing,
            rollout__cancel_stale=self.cancel_stale,
            rollout__requeue_tries=self.requeue_tries,
            collector__count=self.collectors,
            cluster__max_collectors=self.most_collectors,
            trainer__ranks=self.ranks,
            trainer__publish_timeout_s=_PUBLISH_S,
            supervision__restarts=self.restarts,
            data_plane__capacity_rows=None if self.capacity is None else limit + self.capacity,
            data_plane__poll_s=self.poll_s,
            filters=filters,
        )

    @property
    def _kills(self) -> tuple[float, float]:
        return self.killed_at, self.killed_at + self.killed_again_s

    def _generator(self, index: int) -> FakeGenerator:
        tries = 0

        def fail(call: int) -> None:
            if self.failing_calls[(call + index) % len(self.failing_calls)]:
                raise RuntimeError(f"call {call}")

        def refuse(version: int) -> float:
            nonlocal tries
            tries += 1
            if tries - 1 in self.bad_publishes:
                raise OSError(f"load {tries}")
            return self.slow_publishes[tries % len(self.slow_publishes)]

        parts: dict[str, Any] = {
            "seconds": lambda call: self.seconds[(call + 3 * index) % len(self.seconds)] * self.slower**index,
            "length": lambda call: self.lengths[(call + index) % len(self.lengths)],
            "fail": fail,
            "refuse": refuse,
            "dies_at": self.dies_at if index == 0 else math.inf,
        }
        return _MortalSpanning(clock=virtual_clock, **parts) if self.stale_mode == "tokens" else _Mortal(**parts)

    def _fail_rank(self, step: int) -> None:
        if step == self.rank_dies_at_step:
            raise Death(f"in step {step}")

    def _reward(self, prompt: int, index: int) -> Reward:
        value = self.rewards[(prompt * self.size + index) % len(self.rewards)]
        if value == "raise":
            raise ValueError("no score")
        return Reward(cast("float", value))

    async def _interrupt(self, controller: Controller) -> None:
        await anyio.sleep(self.interrupt_at)
        controller.interrupt()


@dataclass(frozen=True, slots=True)
class Run:
    """A schedule, what it left, and what was really done to the data plane."""

    schedule: Schedule
    outcome: Outcome
    plane: WatchedPlane

    @property
    def violations(self) -> list[str]:
        """Say which invariants the run broke; an ending that the schedule does not explain is one."""
        schedule = self.schedule
        plane_s = max(schedule.plane_seconds) + max(schedule.plane_answers)
        patience_s = 1.0 + 6 * plane_s + 6 * (max(schedule.call_seconds) + max(schedule.answer_seconds))
        said = violations(self.outcome, self.plane, patience_s=patience_s)
        if not self._explained:
            said.append(f"ended with {self.outcome.ending.reason}")
        if self.outcome.seconds > _LONGEST_S:
            said.append(f"it took {self.outcome.seconds:g} s")
        return said

    @property
    def _explained(self) -> bool:
        schedule, ending = self.schedule, self.outcome.ending
        if ending.error is None:
            return ending.code != 130 or math.isfinite(schedule.interrupt_at)
        unscored = {value for value in schedule.rewards if value is None or value == "raise"}
        kills = sum(map(math.isfinite, schedule._kills))
        # A collector that works is replaced; one that is killed before the first version is published is not.
        began = self.outcome.of(Published)[:1]
        # So is one that takes weights too slowly, or refuses them, which may use up the budget.
        loads = not schedule.bad_publishes and max(schedule.slow_publishes) < _PUBLISH_S
        replaced = bool(began) and schedule.killed_at > began[0].t and kills <= schedule.restarts and loads
        # A node that ends before there is a version to publish takes the run with it, and one without collectors waits.
        early = any(not began or at <= began[0].t for at in (schedule.nodes.gone_at if schedule.nodes else {}).values())
        there = schedule.collectors + len(self.outcome.of(CollectorAdded)) - len(self.outcome.of(CollectorLeft))
        causes = {
            "Overdue: no group": there == 0,
            "Death: ": math.isfinite(schedule.dies_at) or schedule.rank_dies_at_step > 0,
            "GenerationError: ": any(schedule.failing_calls) or HANG_S in schedule.seconds or bool(unscored),
            "RefillExhausted: ": schedule.refill == "error",
            "OSError: load": bool(schedule.bad_publishes),
            "ActorDied: ": early
            or ((kills > 0 or not loads) and not (schedule.killed.startswith("collector") and replaced)),
            # One try failed, and two were too short for a slow load.
            "Overdue: version": (bool(schedule.bad_publishes) and max(schedule.slow_publishes) > _PUBLISH_S)
            or (schedule.hangs and kills > 0 and not replaced),
        }
        return any(ending.reason.startswith(cause) and possible for cause, possible in causes.items())
