"""Replay: the same log in, the same decisions out.

Forced are the claims (which groups, in which order) and their ends, the arrivals and failures of
groups, and when the trainer took a batch, ended a step and heard of a served version. Derived, by
the real front end, chain and planner, are how many groups are asked for, verdicts, batches, plans, what
the ranks are given, steps and fates; each is compared with the log. What dispatcher, publisher and gate do
is forced, and held to what they may do (loop.py). Where judged groups become ready
again, the batch that had them begins anew.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import msgspec

from asyncrl.configs import RunConfig, load
from asyncrl.configs.load import DEFAULT_PRESET
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    BatchTaken,
    Claimed,
    ClaimReturned,
    CollectorLeft,
    Dispatched,
    Judged,
    Measured,
    OwnerDead,
    Planned,
    Published,
    Resumed,
    RunEnded,
    Settled,
    StepEnded,
    StepStarted,
    WorkGiven,
    unwritten,
)
from asyncrl.engine.loop.handover import Handover
from asyncrl.engine.records.ending import LIMIT_STEPS, failure
from asyncrl.engine.records.fate import RUN_ENDED, dropped
from asyncrl.engine.records.work import TrainWork
from asyncrl.engine.trace.claims import judged_claims, lost_rows
from asyncrl.engine.trace.difference import DERIVED, Difference, Produced, title
from asyncrl.engine.trace.forced_plane import ForcedPlane, current_batch
from asyncrl.engine.trace.gates import Gates
from asyncrl.engine.trace.given import unlike
from asyncrl.engine.trace.loop import Loop
from asyncrl.engine.trace.machinery import Machinery, replay_ranks, without_limits
from asyncrl.engine.trace.recording import Recording, recorded_values
from asyncrl.engine.trace.restartable import Restartable
from asyncrl.filters import Chain
from asyncrl.filters.statistics import RunningStatistics

# Virtual seconds in which everything that can happen after an event does.
_LULL_S = 1e-6
_SINCE_WORK_GIVEN = 3


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to: the first difference or None, what it logged, and each rank's work by step."""

    difference: Difference | None
    events: Sequence[AnyEvent]
    works: Sequence[Mapping[int, TrainWork]]
    statistics: RunningStatistics


def replay(
    recording: Recording,
    *,
    config: RunConfig | None = None,
    chain: Chain | None = None,
    allow_code: Sequence[str] = (),
) -> Replayed:
    """Replay a log under its own configuration and compare every derived event.

    `chain` stands in for the configured filters, for logs of runs that had theirs given in code. ConfigError if the
    log names filters as module:Class that are not in `allow_code`: whoever wrote the log chose them.
    """
    recording.require_whole("a replay")
    recording.require_tags("a replay")
    used = config or recording.config()
    filters = chain or recording.chain(used, allow_code)

    async def main() -> Replayed:
        return await _Replay(recording, used, filters).run()

    return run_virtual(main)


class _Replay:
    """One replay. The log is walked event by event; after each, everything that waits for it runs dry."""

    def __init__(self, recording: Recording, config: RunConfig, chain: Chain) -> None:
        self._recording = recording
        self._produced = Produced()
        self._loop = Loop(recording, config, refill=chain.refill is not None)
        self._gates = Gates()
        self._chain = chain
        self._measured: dict[int, Mapping[str, Any]] = {}
        self._error: Exception | None = None
        self._plane = ForcedPlane(
            clock=virtual_clock,
            group_size=config.rollout.group_size,
            more_to_come=self._more_to_come,
            lost=lost_rows(recording.events),
        )
        self._to_dispatch = sum(isinstance(event, Dispatched) for event in recording.events)
        self._ranks = replay_ranks(config, chain, trained=self._step_ends, measured=self._measures)
        self._machinery = Machinery(
            without_limits(config),
            chain=chain,
            cost=recording.cost,
            plane=self._plane,
            ranks=self._ranks,
            generators=recording.generators,
            folds=[self._produced],
            more_may_come=self._plane.more_may_come,
        )
        self._core = self._machinery.core
        self._handover = Handover(self._core.take, self._core.groups.changed)
        # Older logs do not say when a batch was taken; then it is as soon as the trainer is free.
        self._says_taken = any(isinstance(event, BatchTaken) for event in recording.events)
        self._claims = judged_claims(recording.events)
        self._stopped = False

    async def run(self) -> Replayed:
        await self._plane.start()
        for claim in self._claims.values():
            self._plane.expect(claim.batch)
        async with anyio.create_task_group() as tasks:
            self._collector = Restartable(tasks, partial(self._guarded, self._assemble))
            self._trainer = Restartable(tasks, partial(self._guarded, self._train))
            self._collector.start()
            self._trainer.start()
            await _lull()
            difference = await self._walk()
            tasks.cancel_scope.cancel()
        machinery = self._machinery
        return Replayed(
            difference,
            self._produced.events,
            [rank.works for rank in self._ranks],
            machinery.core.judged,
        )

    async def _walk(self) -> Difference | None:
        for event in self._recording.events:
            difference = await self._follow(event)
            if difference is not None:
                return difference
        return self._left_over()

    async def _follow(self, event: AnyEvent) -> Difference | None:
        """Let an event of the log happen, then compare it if it is derived."""
        impossible = self._impossible(event) or self._loop.fault(event)
        if impossible:
            return Difference(event.seq, title(event), impossible)
        await self._happen(event)
        if self._plane.refused:
            return Difference(event.seq, title(event), self._plane.refused)
        return self._compare(event)

    def _compare(self, event: AnyEvent) -> Difference | None:
        if isinstance(event, RunEnded):
            return self._compare_ending(event)
        difference = self._produced.compare(event) if isinstance(event, DERIVED) else None
        if difference is None:
            return None
        if isinstance(event, WorkGiven):
            works = [rank.given[event.stage] for rank in self._ranks if event.stage in rank.given]
            difference = replace(difference, why=(works and unlike(event, works)) or difference.why)
        if self._error is not None:
            why = f"{difference.why}; it stopped with {type(self._error).__name__}: {self._error}"
            return replace(difference, why=why)
        return difference

    def _impossible(self, event: AnyEvent) -> str:
        """Say why an event cannot follow those before it; empty if it can."""
        known = self._machinery.groups_seen
        match event:
            case Claimed() if any(group not in known for group in event.groups):
                return f"groups {[group for group in event.groups if group not in known]} were never put"
            case Acknowledged() if event.version > self._core.versions.trainer:
                return f"version {event.version}, and the replay's trainer is at {self._core.versions.trainer}"
        return ""

    async def _happen(self, event: AnyEvent) -> None:
        """Let an event of the log happen, and then everything that waited for it."""
        machinery = self._machinery
        match event:
            case Claimed() if event.seq in self._claims:
                claim = self._claims[event.seq]
                # Of a claim that was given back in part it is not known what was asked of the rest.
                asked = event.asked if claim.groups == event.groups else None
                groups = [machinery.groups_seen[group] for group in claim.groups]
                self._plane.allow(claim.batch, groups, asked=asked)
                await _lull()
            case ClaimReturned() | OwnerDead() | CollectorLeft():
                await self._take_back(event)
            case Resumed() if event.config:
                self._go_on(event)
                await _lull()
            case Resumed():
                # A driver that has nothing but the store: it knows nothing of the batches under way.
                self._produced.forget()
                self._trainer.restart()
                self._collector.restart()
                self._core.versions.give_up()
                await _lull()
            case BatchJudged():
                self._plane.complete(event.batch)
                await _lull()
            case BatchTaken() | BatchGivenUp():
                self._gates.open((type(event), event.batch))
                await _lull()
            case Measured():
                self._measured[event.batch] = unwritten(event.log_ratios)
                self._gates.open((Measured, event.batch))
                await _lull()
            case StepEnded():
                self._gates.open((StepEnded, event.step))
                await _lull()
            case Acknowledged():
                self._core.versions.acknowledge(event.generator, event.version)
                await _lull()
            case Settled() if dropped(RUN_ENDED) in event.fates and not self._produced.settled(event.group):
                await self._stop()
            case _:
                self._to_dispatch -= isinstance(event, Dispatched)
                machinery.feed(event)
                self._plane.look()
                if isinstance(event, Published):  # With no generator left a step may have waited for it.
                    await _lull()

    def _go_on(self, event: Resumed) -> None:
        """Have the ranks and collectors of the resumed run, which knows all that the loop knew at the checkpoint."""
        config = load(DEFAULT_PRESET, recorded_values(event.config, "the resumed run")).config
        more = replay_ranks(config, self._chain, trained=self._step_ends, measured=self._measures)
        self._ranks += more[len(self._ranks) :]
        ranks = self._ranks[: config.trainer.replicas]
        self._machinery.go_on(without_limits(config), ranks, self._recording.generators_after(event.seq))
        self._trainer.restart()  # It may have come to the limit of steps before.

    async def _take_back(self, event: ClaimReturned | OwnerDead | CollectorLeft) -> None:
        """Make groups ready again. Ones that were claimed and not judged are still so: their claim was left out.

        A generator that will be replaced, or has left, is not waited for any more.
        """
        gone = event.collector if isinstance(event, CollectorLeft) else ""
        if isinstance(event, OwnerDead) and event.replaced:
            gone = event.owner
        if gone:
            self._core.versions.leave(gone)
            await _lull()
        if isinstance(event, CollectorLeft):
            return
        groups = [meta for meta in self._core.groups.claimed(event.groups) if meta.row not in self._plane.lost]
        if groups:
            self._collector.restart()
            await _lull()
            await self._plane.forget(groups)
            self._machinery.take_back(msgspec.structs.replace(event, groups=[meta.group for meta in groups]))

    async def _stop(self) -> None:
        """Do as the controller does at the end of a run: nothing goes on, and what has no fate gets one."""
        if not self._stopped:
            self._stopped = True
            await self._core.groups.settle_rest()

    async def _assemble(self) -> None:
        core = self._core
        while True:
            current_batch.set(core.front_end.batches)
            batch = await core.assemble()
            if batch is None:
                await anyio.sleep_forever()
            elif batch.kept:
                if self._says_taken:
                    await self._gates.wait((BatchTaken, batch.index))
                await self._handover.offer(batch)
            else:
                core.close(batch, None)

    async def _train(self) -> None:
        core = self._core
        while (batch := await self._handover.next()) is not None:
            current_batch.set(batch.index)
            trained = await core.train(batch)
            if trained is None and self._says_taken:
                await self._gates.wait((BatchGivenUp, batch.index))
            core.close(batch, trained)
            if core.limit() == LIMIT_STEPS:
                return

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Keep what the front end, a filter or the planner raises: the log's run ended with it as well, or not."""
        try:
            await work()
        except Exception as error:  # The replay's edge: it becomes a difference, unless the log has it too.
            self._error = self._error or error

    def _more_to_come(self) -> bool:
        """Say whether a group comes by the log, so that no batch can be short."""
        groups = self._core.groups
        return bool(self._to_dispatch or groups.any_in_flight or groups.buffered)

    async def _step_ends(self, work: TrainWork) -> None:
        await self._gates.wait((StepEnded, work.step))

    async def _measures(self) -> Mapping[str, Any]:
        batch = current_batch.get()
        await self._gates.wait((Measured, batch))
        return self._measured[batch]

    def _compare_ending(self, event: RunEnded) -> Difference | None:
        if self._error is None or failure(self._error).reason == event.reason:
            return None
        why = f"the run ended with {event.reason!r}, the replay with {failure(self._error).reason!r}"
        return Difference(event.seq, title(event), why)

    def _left_over(self) -> Difference | None:
        """Return what the replay says beyond a log of a run that came to its end in order."""
        ended = self._recording.ended
        if ended is None or ended.code != 0:
            return None
        # The last batch may have been cut off between its verdicts and its end.
        kinds: tuple[type, ...] = (Judged, Planned, StepStarted, StepEnded, Settled)
        if self._recording.started.schema >= _SINCE_WORK_GIVEN:
            kinds += (WorkGiven,)
        more = self._produced.rest(kinds)
        if more is None:
            return None
        return Difference(0, title(more), "the replay says it, and the log does not")


async def _lull() -> None:
    """Return when every task waits: on the virtual clock time passes only then."""
    await anyio.sleep(_LULL_S)


def rank_works(replayed: Replayed, step: int) -> list[TrainWork]:
    """Return each rank's part of a step; TraceError if the run had no such step."""
    if not any(step in works for works in replayed.works):
        steps = sorted(replayed.works[0]) if replayed.works else []
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise TraceError(f"the log has no step {step}; {known}")
    # A run may have been resumed with fewer ranks, or with more.
    return [works[step] for works in replayed.works if step in works]
