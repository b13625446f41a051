"""The core of the loop without a controller and without actors: a replay, a what-if or a script drives it."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import Deployment
from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import EventLog, Fold
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import (
    AnyEvent,
    ClaimReturned,
    Dispatched,
    Finished,
    GroupFailed,
    OwnerDead,
    Published,
    Put,
    RanksPlaced,
    Settled,
    VersionSet,
    unwritten,
)
from asyncrl.engine.loop.core import Core
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.fate import CANCELLED, NOT_RESTORED, RECALLED, dropped
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork, Work
from asyncrl.engine.trace.forced_plane import FOR_EVER_S, OWNER
from asyncrl.engine.weights.stand_in import NoWeights
from asyncrl.filters import Chain
from asyncrl.trainers.fan_out import Cost

_NO_LIMIT = 1 << 60


async def _at_once(work: TrainWork) -> None:
    """Take no time."""


@dataclass(slots=True)
class ReplayRank(NoWeights):
    """Stands for a rank: it trains when `trained` lets it, and measures what `measured` says.

    What was not measured is an error if a filter judges by it, and NaN if only the loss would use it. The
    first rank counts all tokens of the step, so that the ranks' sum is the plan's.
    """

    index: int
    judged_by: bool = True
    trained: Callable[[TrainWork], Awaitable[None]] = _at_once
    measured: Callable[[], Awaitable[Mapping[str, Any]]] | None = None
    works: dict[int, TrainWork] = field(default_factory=dict)
    given: dict[str, Work] = field(default_factory=dict)
    """The newest work of each stage."""

    @property
    def name(self) -> str:
        return f"rank{self.index}"

    async def train(self, work: TrainWork) -> RankResult:
        self.works[work.step] = self.given[work.stage] = work
        await self.trained(work)
        return RankResult(0.0, 0.0, 0, 0.0, 0 if self.index else work.total_tokens, 0.0)

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        self.given[work.stage] = work
        if work.reference:
            return {}
        assert self.measured is not None
        log_ratios = await self.measured()
        keys = [key for batch in work.micro_batches if not batch.filler for key in batch.keys]
        lacking = [key for key in keys if key not in log_ratios]
        if lacking and self.judged_by:
            raise TraceError(
                f"a filter judges by log-probabilities, and the recorded run measured none of {len(lacking)} samples "
                f"that it would train, such as {lacking[0]}"
            )
        unknown = (math.nan, math.nan)
        return {key: (log_ratios[key][0], log_ratios[key][1]) if key in log_ratios else unknown for key in keys}

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        return 0.0

    async def digest(self) -> Mapping[str, int]:
        return {}

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        return []


def replay_ranks(
    config: RunConfig,
    chain: Chain,
    *,
    trained: Callable[[TrainWork], Awaitable[None]] = _at_once,
    measured: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
) -> list[ReplayRank]:
    """Stand in for all replicas of a configuration, which are what a batch is planned for."""
    return [ReplayRank(index, chain.needs_logprobs, trained, measured) for index in range(config.trainer.replicas)]


class _Named:
    """Stands for a collector of which only the name matters."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Recorded:
    """Prompts of a log: what may come is up to whoever drives the core by it, and nothing is granted again."""

    def __init__(self, more_may_come: Callable[[], bool]) -> None:
        self._more_may_come = more_may_come

    def more_may_come(self, *, in_flight: bool) -> bool:
        return self._more_may_come()

    def lost(self, grant: Grant, reason: str) -> None:
        """Do nothing: the log says what was granted again."""


def without_limits(config: RunConfig) -> RunConfig:
    """Return a configuration under which no limit of time holds, and claims are not delayed: the log says when."""
    rollout, plane, supervision = config.rollout, config.data_plane, config.supervision
    mode = "tokens" if rollout.stale_mode == "tokens" else "drop"
    return config.model_copy(
        update={
            "rollout": rollout.model_copy(update={"stale_mode": mode}),
            "data_plane": plane.model_copy(update={"poll_s": 0.0, "lease_s": FOR_EVER_S}),
            "supervision": supervision.model_copy(update={"starve_timeout_s": FOR_EVER_S}),
        }
    )


class Machinery:
    """The core of the loop without actors, fed with recorded events. `folds` see what it logs."""

    def __init__(
        self,
        config: RunConfig,
        *,
        chain: Chain,
        cost: Cost | None,
        plane: DataPlane,
        ranks: Sequence[ReplayRank],
        generators: Iterable[str],
        folds: Sequence[Fold],
        more_may_come: Callable[[], bool],
    ) -> None:
        self.groups_seen: dict[int, GroupMeta] = {}
        self._plane, self._cost = plane, cost
        progress = Progress(config.run.reward_window)
        self.log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[progress, *folds])
        self.core = Core(
            config,
            self._deployment(ranks, generators),
            chain=chain,
            log=self.log,
            progress=progress,
            clock=virtual_clock,
            prompts=_Recorded(more_may_come),
            run_ahead=_NO_LIMIT,
        )
        self._seconds: dict[int, float | None] = {}

    def _deployment(self, ranks: Sequence[ReplayRank], generators: Iterable[str]) -> Deployment:
        collectors: list[Any] = [_Named(name) for name in generators]
        return Deployment(self._plane, collectors, ranks, (), (), self._cost, owner=OWNER)

    def go_on(self, config: RunConfig, ranks: Sequence[ReplayRank], generators: Iterable[str]) -> None:
        """Go on as a run that was resumed, with ranks and collectors of its own."""
        self.core.go_on(config, self._deployment(ranks, generators))

    def set_version(self, version: int) -> None:
        """Bring the trainer to a version without a step; an older one changes nothing."""
        if version > self.core.versions.trainer:
            self.log.append(VersionSet(version=version))
        while self.core.versions.trainer < version:
            self.core.versions.advance()

    def take_back(self, event: ClaimReturned | OwnerDead) -> None:
        """Make claimed groups ready again."""
        self.core.groups.take_back(event.groups)
        self.log.append(event)

    def feed(self, event: AnyEvent) -> None:
        """Take in an event that says what happened to a group outside: dispatch, arrival, failure, cancelling."""
        groups = self.core.groups
        match event:
            case Dispatched():
                prompt = Prompt(event.prompt, "", dataset=event.dataset)
                groups.dispatch(
                    Grant(event.group, prompt, event.size, event.seed),
                    event.collector,
                    served=self.core.versions.served.get(event.collector, 0),
                    retry_of=event.retry_of,
                )
            case RanksPlaced():
                self.core.place_ranks(event.nodes)
            case VersionSet():
                self.set_version(event.version)
            case Finished():
                self._seconds[event.group] = event.seconds
            case Put():
                group = self.groups_seen[event.group] = GroupMeta(tuple(event.keys), unwritten(event.tags))
                groups.arrive(group, seconds=self._seconds.pop(event.group, None))
            case GroupFailed():
                groups.fail(event.group, event.reason, event.error)
            case Settled() if groups.in_flight(event.group) and dropped(NOT_RESTORED) in event.fates:
                groups.abandon(event.group)
            case Settled() if groups.in_flight(event.group):
                for reason in (CANCELLED, RECALLED):
                    if dropped(reason) in event.fates:
                        groups.fail(event.group, reason, "")
            case Published():
                self.core.published(event.version)
