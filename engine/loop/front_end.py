"""The replay front end: claims whole groups, holds the hard bound on age, runs the filter chain.

A batch is `groups_per_step` groups judged or, with refill, kept. The bound (reason `stale`) always holds, and no
filter can lift it. It is checked twice: at the claim for the version at which the batch will be trained, and at
hand-off for the trainer's version. Only the front end claims. Judging reads tags; no tensor moves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anyio
import structlog

from asyncrl.configs import RunConfig
from asyncrl.engine.checkpoint.state import FrontEndState
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import BatchJudged, Judged, digest
from asyncrl.engine.loop.batch import Batch
from asyncrl.engine.loop.claim_gate import can_claim_without_expiring
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.refill_budget import RefillBudget
from asyncrl.engine.loop.settlement import Settlement, drop_fates
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.fate import STALE
from asyncrl.filters import Chain, FilterContext
from asyncrl.filters.statistics import RunningStatistics

log = structlog.get_logger()

LEASE_LOST = "lease_lost"


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    """Who claims, and by which rules. `_s` are seconds, `max_staleness` is in versions."""

    owner: str
    groups_per_step: int
    max_staleness: int
    stale_mode: Literal["drop", "gate", "tokens"]
    gate_timeout_s: float
    seed: int
    poll_s: float
    starve_timeout_s: float
    lease_s: float

    @classmethod
    def of(cls, config: RunConfig, *, owner: str) -> "FrontEndSettings":
        """Take what a front end needs out of a run's configuration."""
        rollout = config.rollout
        return cls(
            owner=owner,
            groups_per_step=rollout.groups_per_step,
            max_staleness=rollout.max_staleness,
            stale_mode=rollout.stale_mode,
            gate_timeout_s=rollout.gate_timeout_s,
            seed=config.run.seed,
            poll_s=config.data_plane.poll_s,
            starve_timeout_s=config.supervision.starve_timeout_s,
            lease_s=config.data_plane.lease_s,
        )


@dataclass(frozen=True, slots=True)
class FrontEndStatistics:
    """Numbers of batches assembled, of claims that the gate held back, and of claims that came before a notice."""

    batches: int
    gate_waits: int
    poll_hits: int


class FrontEnd:
    """Claims for one consumer. `more_may_come` says whether another group can still arrive.

    `judged` are the running statistics that filters see.

    Example, at 2 groups per step, bound 2 and trainer version 3 while no batch is under way: of groups stamped 3, 0
    and 2, the batch takes the oldest two, 0 and 2. Group 0 would be trained at age 3, so it is dropped as stale, and
    without refill the batch is the other one alone. With refill the front end claims the third in its place.
    """

    def __init__(
        self,
        settings: FrontEndSettings,
        *,
        plane: DataPlane,
        groups: Groups,
        chain: Chain,
        versions: Versions,
        log: EventLog,
        judged: RunningStatistics,
        more_may_come: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._plane = plane
        self._groups = groups
        self._chain = chain
        self._versions = versions
        self._log = log
        self._more_may_come = more_may_come
        self._judged = judged
        self._refill = RefillBudget(chain.refill, groups_per_step=settings.groups_per_step)
        self._batches = 0
        self._gate_waits = 0
        self._poll_hits = 0
        self._closed = False
        self._claims = 0
        self._refilling = False
        self._open: Batch | None = None
        self._restored: Batch | None = None

    @property
    def waiting(self) -> Batch | None:
        """The batch of a checkpoint that was complete when it was made: it waits for the trainer."""
        restored = self._restored
        return restored if restored is not None and restored.index < self._batches else None

    def state(self) -> FrontEndState:
        """Return the batches that are not in training, for `restore`; the last of them may be in the making."""
        batch = self._open
        earlier = [one for one in self._refill.handed_on if one is not batch]
        return FrontEndState(self._batches, batch.state() if batch else None, [one.state() for one in earlier])

    def restore(self, state: FrontEndState, groups: Mapping[int, GroupMeta]) -> None:
        """Go on from a checkpoint; `groups` are those that are claimed again, by number."""
        self._batches = state.batches
        for earlier in state.handed_on:
            self._refill.hand_on(Batch.restored(earlier, groups))
        if state.open is not None:
            self._open = self._restored = Batch.restored(state.open, groups)
        if self.waiting is not None:
            self._refill.hand_on(self.waiting)

    def let_go(self, batch: Batch) -> None:
        """Note that a batch is the trainer's now, or is closed."""
        if batch is self._open:
            self._open = None
        if batch is self._restored:
            self._restored = None

    @property
    def batches(self) -> int:
        """How many batches were assembled."""
        return self._batches

    @property
    def closed(self) -> bool:
        return self._closed

    def statistics(self) -> FrontEndStatistics:
        return FrontEndStatistics(self._batches, self._gate_waits, self._poll_hits)

    async def next_batch(self) -> Batch:
        """Assemble a batch; it is short, or empty, only if no more groups can come, or after `close`.

        Raises RefillExhausted if configured, and Overdue if no group arrives in time.
        """
        batch = self._open = self._restored or Batch(self.batches)
        await self._fill(batch)
        if not batch.judged or self.closed:
            return batch
        self._batches += 1
        self._refill.hand_on(batch)
        self._log.append(
            BatchJudged(
                batch=batch.index,
                judged=len(batch.judged),
                kept=len(batch.kept),
                attempts=batch.attempts(self._settings.groups_per_step),
                reward_sum=batch.reward_sum,
                reward_count=batch.reward_count,
            )
        )
        return batch

    async def keep_claims(self) -> None:
        """Renew all claims well before they expire, so that only those of a lost owner do."""
        while True:
            await anyio.sleep(self._settings.lease_s / 3)
            await self._groups.renew()

    def close(self) -> None:
        """Claim no more. A batch in the making is given up; a batch at hand-off stays as it is.

        Nothing is cancelled: the store carries out a cancelled claim all the same, and nobody would own its groups.
        """
        self._closed = True
        self._groups.changed.notify()

    async def hand_off(self, batch: Batch) -> None:
        """Check age and claim of every kept group again, just before training.

        Groups that fail are dropped. With refill they are replaced; without it the batch is shorter.
        """
        batch.taken = True
        while batch.kept:
            held = await self._plane.leased(self._groups.lease([j.group for j in batch.kept]))
            lost = {
                j.group.group: STALE if j.group.row in held else LEASE_LOST
                for j in batch.kept
                if j.group.row not in held or self._is_stale(j.group, self._versions.trainer)
            }
            if not lost:
                return
            await self._settle_dropped(batch.lose(lost))
            if self._chain.refill is None:
                return
            self._refilling = True
            try:
                await self._fill(batch)
            finally:
                self._refilling = False

    def _is_stale(self, group: GroupMeta, version: int) -> bool:
        """Return whether the hard bound drops a group; in mode `tokens` the plan withholds tokens instead."""
        return group.age(version) > self._settings.max_staleness and self._settings.stale_mode != "tokens"

    def _version(self, batch: Batch) -> int:
        """Return the version at which a batch will be trained."""
        return self._versions.trainer if batch.taken else self._versions.next_batch

    def _passes_gate(self, batch: Batch, wanted: int) -> bool:
        return self.closed or can_claim_without_expiring(
            arrived=self._groups.versions_buffered(),
            in_flight=self._groups.versions_in_flight(),
            wanted=wanted,
            per_batch=self._settings.groups_per_step,
            at=self._version(batch),
            bound=self._settings.max_staleness,
        )

    async def _gate(self, batch: Batch, wanted: int) -> None:
        """In mode `gate`, wait while a claim would make a later group too old, until the batch has timed out once."""
        may_pass = partial(self._passes_gate, batch, wanted)
        if self._settings.stale_mode != "gate" or batch.gate_overdue or may_pass():
            return
        self._gate_waits += 1
        if not await self._groups.changed.wait_at_most(may_pass, self._settings.gate_timeout_s):
            batch.gate_overdue = True
            log.warning(
                "the gate opened by its deadline; what is still in flight may be dropped as stale",
                timeout_s=self._settings.gate_timeout_s,
                in_flight=self._groups.statistics().in_flight,
            )

    async def _fill(self, batch: Batch) -> None:
        while not self.closed and (wanted := self._refill.wanted(batch)):
            groups = await self._claim(batch, wanted)
            if not groups:
                return
            await self._judge(batch, groups)

    async def _claim(self, batch: Batch, wanted: int) -> Sequence[GroupMeta]:
        """Claim up to `wanted` groups, once that many have arrived or no more can; empty if there are none.

        After `poll_s` it takes what is there, whatever the notices say.
        """
        seen = -1
        try:
            with anyio.fail_after(self._settings.starve_timeout_s) as starving:
                while True:
                    told = await self._groups.changed.wait_at_most(
                        partial(self._worth_claiming, batch, wanted, seen), self._settings.poll_s
                    )
                    if self._comes_second(batch):
                        continue
                    seen = self._groups.arrivals
                    # The gate has a deadline of its own.
                    left_s, starving.deadline = starving.deadline - anyio.current_time(), math.inf
                    await self._gate(batch, wanted)
                    starving.deadline = anyio.current_time() + left_s
                    if self.closed:
                        return ()
                    # Read before the claim: the last groups may arrive while its answer is on its way.
                    last = not self._more_may_come()
                    groups = await self._claim_once(wanted, told=told)
                    if groups:
                        return groups
                    if last and not self._more_may_come():
                        return ()
        except TimeoutError as error:
            if isinstance(error, Overdue):
                raise
            versions, now = self._versions, self._groups.statistics()
            raise Overdue(
                f"no group to judge for {self._settings.starve_timeout_s:g} s: {now.in_flight} in flight, of which "
                f"{self._groups.awaited()}; run-ahead {now.run_ahead}/{now.run_ahead_limit}, trainer version "
                f"{versions.trainer}, published {versions.published}"
            ) from None

    async def _claim_once(self, wanted: int, *, told: bool) -> Sequence[GroupMeta]:
        """Claim groups that are there, and return the new ones."""
        # Numbered before the call, because a hand-off that refills claims at the same time as the next batch.
        claim_id = f"{self._settings.owner}/{self._claims}"
        self._claims += 1
        claim = await self._plane.claim(
            self._groups.partition,
            self._groups.consumer,
            columns=COLUMNS,
            max_groups=wanted,
            owner=self._settings.owner,
            claim_id=claim_id,
        )
        unknown = any(self._groups.in_flight(group.group) for group in claim.groups)
        self._poll_hits += unknown and not told
        new = self._groups.claim(claim, asked=wanted)
        await self._groups.clear_unknown(claim)
        return new

    def _comes_second(self, batch: Batch) -> bool:
        """Return whether another batch, for which the trainer waits, gets the next groups."""
        return self._refilling and not batch.taken

    def _worth_claiming(self, batch: Batch, wanted: int, seen: int) -> bool:
        if self.closed or self._comes_second(batch):
            return self.closed
        enough = self._groups.buffered >= wanted and self._groups.arrivals != seen
        return enough or not self._more_may_come()

    async def _judge(self, batch: Batch, groups: Sequence[GroupMeta]) -> None:
        version = self._version(batch)
        fresh = [group for group in groups if not self._is_stale(group, version)]
        context = FilterContext(
            trainer_version=version, step=version, seed=self._settings.seed, statistics=self._judged
        )
        judgements = {j.group.group: j for j in self._chain.judge(fresh, context)}
        self._judged.update(groups)
        dropped: list[tuple[GroupMeta, str]] = []
        for group in groups:
            judgement = judgements.get(group.group)
            reason = STALE if judgement is None else judgement.dropped
            batch.judge(group, judgement, reason)
            self._log.append(
                Judged(
                    group=group.group,
                    batch=batch.index,
                    age=group.age(version),
                    dropped=reason,
                    by=judgement.by if judgement else "front_end",
                    masked=dict(judgement.masked) if judgement else {},
                    digest=digest(group.tags),
                )
            )
            if reason is not None:
                dropped.append((group, reason))
        await self._settle_dropped(dropped)

    async def _settle_dropped(self, dropped: Sequence[tuple[GroupMeta, str]]) -> None:
        """Settle groups; with refill their capacity comes back now, without it with their batch."""
        settlements = [Settlement(group, drop_fates(group, reason)) for group, reason in dropped]
        await self._groups.settle(settlements, release=self._chain.refill is not None)
