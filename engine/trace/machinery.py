"""The real front end, chain, step and register of groups, without a controller: a replay or a script drives them."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.aio.virtual_time import virtual_clock
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import CONSUMER, PARTITION
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
    Put,
    Settled,
    VersionSet,
    unwritten,
)
from asyncrl.engine.loop.front_end import FrontEnd
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.step import Step
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.fate import CANCELLED, dropped
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork, Work
from asyncrl.engine.trace.forced_plane import FOR_EVER_S, OWNER
from asyncrl.filters import Chain
from asyncrl.trainers.fan_out import Cost

_NO_LIMIT = 1 << 60


async def _at_once(work: TrainWork) -> None:
    """Take no time."""


@dataclass(slots=True)
class ReplayRank:
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

    async def weights(self) -> Any:
        return self.name

    async def digest(self) -> Mapping[str, int]:
        return {}

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        return []


class Machinery:
    """Everything from arrival to settlement, fed with recorded events. `folds` see what it logs."""

    def __init__(
        self,
        config: RunConfig,
        *,
        chain: Chain,
        cost: Cost | None,
        plane: DataPlane,
        generators: Iterable[str],
        folds: Sequence[Fold],
        more_may_come: Callable[[], bool],
        poll_s: float = 0.0,
        starve_timeout_s: float = FOR_EVER_S,
    ) -> None:
        self.config = config
        self.chain = chain
        self.plane = plane
        self.groups_seen: dict[int, GroupMeta] = {}
        progress = Progress(config.run.reward_window)
        self.log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[progress, *folds])
        self.versions = Versions(generators)
        self.groups = Groups(
            plane=plane,
            partition=PARTITION,
            consumer=CONSUMER,
            log=self.log,
            run_ahead=RunAhead(_NO_LIMIT),
        )
        self.front_end = FrontEnd(
            plane=plane,
            groups=self.groups,
            chain=chain,
            versions=self.versions,
            log=self.log,
            partition=PARTITION,
            consumer=CONSUMER,
            owner=OWNER,
            groups_per_step=config.rollout.groups_per_step,
            max_staleness=config.rollout.max_staleness,
            # The gate only delays claims, and those are forced.
            stale_mode="tokens" if config.rollout.stale_mode == "tokens" else "drop",
            seed=config.run.seed,
            poll_s=poll_s,
            starve_timeout_s=starve_timeout_s,
            lease_s=FOR_EVER_S,
            more_may_come=more_may_come,
        )
        self.ranks = [ReplayRank(index, chain.needs_logprobs) for index in range(config.trainer.ranks)]
        self.step = Step(
            config=config,
            chain=chain,
            cost=cost,
            progress=progress,
            ranks=self.ranks,
            groups=self.groups,
            versions=self.versions,
            log=self.log,
            clock=virtual_clock,
            statistics=self.front_end.statistics,
        )
        self._seconds: dict[int, float | None] = {}

    def set_version(self, version: int) -> None:
        """Bring the trainer to a version without a step; an older one changes nothing."""
        if version > self.versions.trainer:
            self.log.append(VersionSet(version=version))
        while self.versions.trainer < version:
            self.versions.advance()

    def take_back(self, event: ClaimReturned | OwnerDead) -> None:
        """Make claimed groups ready again."""
        for group in event.groups:
            self.groups.buffered[group] = self.groups.claimed.pop(group)
        self.log.append(event)

    def feed(self, event: AnyEvent) -> None:
        """Take in an event that says what happened to a group outside: dispatch, arrival, failure, cancelling."""
        match event:
            case Dispatched():
                prompt = Prompt(event.prompt, "", dataset=event.dataset)
                served = self.versions.served.get(event.collector, 0)
                self.groups.dispatch(
                    Grant(event.group, prompt, event.size, event.seed),
                    event.collector,
                    served=served,
                    retry_of=event.retry_of,
                )
            case VersionSet():
                self.set_version(event.version)
            case Finished():
                self._seconds[event.group] = event.seconds
            case Put():
                group = self.groups_seen[event.group] = GroupMeta(tuple(event.keys), unwritten(event.tags))
                self.groups.arrive(group, seconds=self._seconds.pop(event.group, None))
            case GroupFailed():
                self.groups.fail(event.group, event.reason, event.error)
            case Settled() if event.group in self.groups.in_flight and dropped(CANCELLED) in event.fates:
                self.groups.fail(event.group, CANCELLED, "")
