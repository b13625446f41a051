"""The replay front end: claims whole groups, holds the hard bound on age, runs the filter chain.

A batch is `groups_per_step` groups judged, or, with refill, kept. The bound (reason `stale`)
always holds and no filter can lift it: at the claim against the version at which the batch will
be trained, at hand-off against the trainer's version. Only the front end claims. After the
claim tags alone are judged; no tensor moves.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import anyio
import structlog

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import Overdue, RefillExhausted
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import BatchJudged, Judged, digest
from asyncrl.engine.loop.claim_gate import can_claim_without_expiring
from asyncrl.engine.loop.groups import Groups, Settlement, drop_fates
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.fate import STALE
from asyncrl.engine.records.group import is_live_reward
from asyncrl.filters import Chain, FilterContext, Judgement
from asyncrl.filters.statistics import RunningStatistics

log = structlog.get_logger()

LEASE_LOST = "lease_lost"


@dataclass(slots=True)
class Batch:
    """A batch in the making. `judged` holds group numbers in the order of judgement.

    `trained` says whether the step found anything to train in it; None: not known yet. `masked` counts the
    samples of a batch with nothing to train, by reason.
    """

    index: int
    kept: list[Judgement] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    trained: bool | None = None
    reward_sum: float = 0.0
    reward_count: int = 0
    partial: bool = False
    handed_over: bool = False
    gate_overdue: bool = False


class FrontEnd:
    """Claims for one consumer. `more_may_come` says whether another group can still arrive."""

    def __init__(
        self,
        *,
        plane: DataPlane,
        groups: Groups,
        chain: Chain,
        versions: Versions,
        log: EventLog,
        partition: str,
        consumer: str,
        owner: str,
        groups_per_step: int,
        max_staleness: int,
        stale_mode: Literal["drop", "gate", "tokens"] = "drop",
        gate_timeout_s: float = 600.0,
        seed: int,
        poll_s: float,
        starve_timeout_s: float,
        lease_s: float,
        more_may_come: Callable[[], bool],
    ) -> None:
        self._lease_s = lease_s
        self._plane = plane
        self._groups = groups
        self._chain = chain
        self._versions = versions
        self._log = log
        self._partition = partition
        self._consumer = consumer
        self._owner = owner
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._stale_mode = stale_mode
        self._gate_timeout_s = gate_timeout_s
        self._seed = seed
        self._poll_s = poll_s
        self._starve_timeout_s = starve_timeout_s
        self._more_may_come = more_may_come
        self.statistics = RunningStatistics()
        self.batches = 0
        self.gate_waits = 0
        self._handed_on: list[Batch] = []
        self._claims = 0
        self._refilling = False
        self.closed = False
        self.poll_hits = 0

    async def next_batch(self) -> Batch:
        """Assemble a batch; it is short, or empty, only when no more groups can come, or after `close`.

        Raises RefillExhausted by configuration, Overdue when no group arrives in time.
        """
        batch = Batch(self.batches)
        await self._fill(batch)
        if not batch.judged or self.closed:
            return batch
        self.batches += 1
        refill = self._chain.refill
        # Elsewhere than with `error` going on is what the user wants: each batch has attempts of its own.
        if refill is not None and refill.on_exhausted == "error":
            self._handed_on.append(batch)
        self._log.append(
            BatchJudged(
                batch=batch.index,
                judged=len(batch.judged),
                kept=len(batch.kept),
                attempts=self._attempts(batch),
                reward_sum=batch.reward_sum,
                reward_count=batch.reward_count,
            )
        )
        return batch

    async def keep_claims(self) -> None:
        """Renew what is claimed, well before it expires: time ends the claims of a lost owner only."""
        while True:
            await anyio.sleep(self._lease_s / 3)
            await self._groups.renew()

    def close(self) -> None:
        """Claim no more: a batch in the making is given up, one that is being handed over goes as it is.

        Nothing is cancelled: a claim that is given up is made all the same, and its groups would be nobody's.
        """
        self.closed = True
        self._groups.changed.notify()

    async def hand_off(self, batch: Batch) -> None:
        """Check age and claim of every kept group again, just before training.

        What falls out is dropped; with refill it is replaced, otherwise the batch goes short.
        """
        batch.handed_over = True
        while batch.kept:
            held = await self._plane.leased(self._groups.holding([j.group for j in batch.kept]))
            lost = {
                j.group.group: STALE if j.group.row in held else LEASE_LOST
                for j in batch.kept
                if j.group.row not in held or self._is_stale(j.group, self._versions.trainer)
            }
            if not lost:
                return
            out = [j.group for j in batch.kept if j.group.group in lost]
            batch.kept = [j for j in batch.kept if j.group.group not in lost]
            batch.drops.update(lost[group.group] for group in out)
            for reason in (STALE, LEASE_LOST):
                gone = [group for group in out if lost[group.group] == reason]
                await self._settle_dropped([(group, reason) for group in gone], held=reason == STALE)
            if self._chain.refill is None:
                return
            self._refilling = True
            try:
                await self._fill(batch)
            finally:
                self._refilling = False

    def _attempts(self, batch: Batch) -> int:
        return -(-len(batch.judged) // self._groups_per_step)

    def _in_vain(self) -> list[Batch]:
        """Return the batches since the last one trained that were given up: they have spent attempts too."""
        while any(batch.trained for batch in self._handed_on):
            self._handed_on.pop(0)
        return [batch for batch in self._handed_on if batch.trained is False]

    def _wanted(self, batch: Batch) -> int:
        """Return how many groups to judge next; 0 when the batch is complete."""
        refill = self._chain.refill
        if refill is None:
            return self._groups_per_step - len(batch.judged)
        missing = self._groups_per_step - len(batch.kept)
        if missing <= 0 or batch.partial:
            return 0
        spenders = [*self._in_vain(), batch]
        judged = sum(len(one.judged) for one in spenders)
        budget = refill.max_attempts * self._groups_per_step - judged
        if budget > 0:
            return min(missing, budget)
        spent = (
            f"{judged} groups judged in {sum(map(self._attempts, spenders))} attempts, {len(batch.kept)} of "
            f"{self._groups_per_step} kept; dropped: {dict(sum((one.drops for one in spenders), Counter()))}"
        )
        if len(spenders) > 1:
            masked = dict(sum((one.masked for one in spenders), Counter()))
            spent += f", masked samples: {masked}; {len(spenders) - 1} batches before had nothing left to train"
        if refill.on_exhausted == "error":
            raise RefillExhausted(
                f"dynamic sampling used up its {refill.max_attempts} attempts: {spent}. "
                "Raise max_attempts, or set on_exhausted of the dynamic_sampling filter"
            )
        if refill.on_exhausted == "train_partial":
            batch.partial = True
            return 0
        attempt = self._groups_per_step - len(batch.judged) % self._groups_per_step
        if attempt == self._groups_per_step:
            log.warning("dynamic sampling goes on past its attempts", spent=spent)
        return min(missing, attempt)

    def _is_stale(self, group: GroupMeta, version: int) -> bool:
        """Say whether the hard bound drops a group; in mode `tokens` the plan withholds tokens instead."""
        return group.age(version) > self._max_staleness and self._stale_mode != "tokens"

    def _version(self, batch: Batch) -> int:
        """Return the version at which a batch will be trained."""
        return self._versions.trainer if batch.handed_over else self._versions.next_batch

    def _passes_gate(self, batch: Batch, wanted: int) -> bool:
        return self.closed or can_claim_without_expiring(
            arrived=(group.version for group in self._groups.buffered.values()),
            in_flight=(self._groups.stamps[group] for group in self._groups.in_flight),
            wanted=wanted,
            per_batch=self._groups_per_step,
            at=self._version(batch),
            bound=self._max_staleness,
        )

    async def _gate(self, batch: Batch, wanted: int) -> None:
        """Wait, once a batch and in mode `gate`, while claiming now would make a later group too old."""
        may_pass = partial(self._passes_gate, batch, wanted)
        if self._stale_mode != "gate" or batch.gate_overdue or may_pass():
            return
        self.gate_waits += 1
        if not await self._groups.changed.wait_at_most(may_pass, self._gate_timeout_s):
            batch.gate_overdue = True
            log.warning(
                "the gate opened by its deadline; what is still in flight may be dropped as stale",
                timeout_s=self._gate_timeout_s,
                in_flight=len(self._groups.in_flight),
            )

    async def _fill(self, batch: Batch) -> None:
        while not self.closed and (wanted := self._wanted(batch)):
            groups = await self._claim(batch, wanted)
            if not groups:
                return
            await self._judge(batch, groups)

    async def _claim(self, batch: Batch, wanted: int) -> Sequence[GroupMeta]:
        """Claim up to `wanted` groups, once so many have arrived or no more can; empty if there are none.

        The slow poll takes what is there after `poll_s`, whatever the notices say.
        """
        seen = -1
        try:
            with anyio.fail_after(self._starve_timeout_s) as starving:
                while True:
                    told = await self._groups.changed.wait_at_most(
                        partial(self._worth_claiming, batch, wanted, seen), self._poll_s
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
            versions = self._versions
            raise Overdue(
                f"no group to judge for {self._starve_timeout_s:g} s: {len(self._groups.in_flight)} in flight, "
                f"run-ahead {self._groups.run_ahead.used}/{self._groups.run_ahead.limit}, trainer version "
                f"{versions.trainer}, published {versions.published}"
            ) from None

    async def _claim_once(self, wanted: int, *, told: bool) -> Sequence[GroupMeta]:
        """Claim what is there, and return what of it is new."""
        # Numbered before the call: a hand-off that refills claims beside the next batch.
        claim_id = f"{self._owner}/{self._claims}"
        self._claims += 1
        claim = await self._plane.claim(
            self._partition,
            self._consumer,
            columns=COLUMNS,
            max_groups=wanted,
            owner=self._owner,
            claim_id=claim_id,
        )
        unknown = any(group.group in self._groups.in_flight for group in claim.groups)
        self.poll_hits += unknown and not told
        new = self._groups.claim(claim, asked=wanted)
        await self._groups.clear_unknown(claim)
        return new

    def _comes_second(self, batch: Batch) -> bool:
        """Say whether another batch, for which the trainer waits, is to have the next groups."""
        return self._refilling and not batch.handed_over

    def _worth_claiming(self, batch: Batch, wanted: int, seen: int) -> bool:
        if self.closed or self._comes_second(batch):
            return self.closed
        enough = len(self._groups.buffered) >= wanted and self._groups.arrivals != seen
        return enough or not self._more_may_come()

    async def _judge(self, batch: Batch, groups: Sequence[GroupMeta]) -> None:
        version = self._version(batch)
        fresh = [group for group in groups if not self._is_stale(group, version)]
        context = FilterContext(trainer_version=version, step=version, seed=self._seed, statistics=self.statistics)
        judgements = {j.group.group: j for j in self._chain.judge(fresh, context)}
        self.statistics.update(groups)
        dropped: list[tuple[GroupMeta, str]] = []
        for group in groups:
            number = group.group
            judgement = judgements.get(number)
            reason = STALE if judgement is None else judgement.dropped
            batch.judged.append(number)
            finite = [r for r in group.rewards if is_live_reward(r) and r is not None]
            batch.reward_sum += sum(finite)
            batch.reward_count += len(finite)
            self._log.append(
                Judged(
                    group=number,
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
                batch.drops[reason] += 1
            elif judgement is not None:
                batch.kept.append(judgement)
        await self._settle_dropped(dropped)

    async def _settle_dropped(self, dropped: Sequence[tuple[GroupMeta, str]], *, held: bool = True) -> None:
        """Settle groups; with refill their capacity comes back now, without it with their batch."""
        settlements = [Settlement(group, drop_fates(group, reason)) for group, reason in dropped]
        await self._groups.settle(settlements, held=held, release=self._chain.refill is not None)
