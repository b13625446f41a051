"""What if: the recorded claims judged again, by the real front end, under another configuration.

What was generated, when it was claimed and how old it then was stay as recorded; which groups make
a batch, what the chain says, what is planned and what is wasted follow from the other
configuration. So it answers "what would these filters have kept?"; what other ages a run would
have had is `asyncrl simulate`'s to say.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Claim
from asyncrl.engine.errors import NothingLearned, RefillExhausted, TraceError
from asyncrl.engine.events.types import (
    SCHEMA,
    AnyEvent,
    Claimed,
    Dispatched,
    GroupFailed,
    Judged,
    Measured,
    Put,
    RunStarted,
    Settled,
    unwritten,
)
from asyncrl.engine.loop.batch import Batch
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.ending import DATA_EXHAUSTED, LIMIT_STEPS, first_cause
from asyncrl.engine.trace.claims import judged_claims
from asyncrl.engine.trace.difference import title
from asyncrl.engine.trace.forced_plane import ForcedPlane
from asyncrl.engine.trace.machinery import Machinery, replay_ranks, without_limits
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.report import RunReport
from asyncrl.filters import Chain

LIMIT = (
    "What was generated, when it was claimed and how old it then was are as recorded: if other groups had been\n"
    "trained, versions would have moved otherwise, and with them ages and what was generated after them.\n"
    "`asyncrl simulate --from RUN` predicts those."
)
"""What a what-if does not say; it stands under every answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Figures of the run as it was and as it would have been; `note` says what cut the second short."""

    before: RunReport
    after: RunReport
    events: Sequence[AnyEvent]
    note: str = ""


def what_if(
    recording: Recording, config: RunConfig, *, chain: Chain | None = None, allow_code: Sequence[str] = ()
) -> Answer:
    """Judge a recorded run again under `config`.

    TagError if its filters need a tag that was not recorded; TraceError if events of the log are missing; ConfigError
    if a filter is code that the log names and `allow_code` does not.
    """
    recording.require_whole("a what-if")
    recording.require_tags("a what-if")
    if config.rollout.group_size != recording.config().rollout.group_size:
        raise TraceError(
            f"rollout.group_size is {config.rollout.group_size}, and the recorded groups have "
            f"{recording.config().rollout.group_size} samples; what was generated cannot be asked about"
        )
    before = _as_it_was(recording)
    filters = chain or recording.chain(config, allow_code)

    async def main() -> Answer:
        return await _WhatIf(recording, config, filters).run(before)

    try:
        return run_virtual(main)
    except ExceptionGroup as group:  # Several ranks meet the same error.
        raise first_cause(group) from None


def _as_it_was(recording: Recording) -> RunReport:
    figures = RunReport()
    for event in recording.events:
        try:
            figures.apply(event)
        except ValueError as error:
            raise TraceError(f"the log is not whole: event {event.seq}, {title(event)}: {error}") from error
    return figures


class _Stream(ForcedPlane):
    """Hands out the recorded claims in order, as many groups as are asked for and were judged at one version.

    `before` hears of the groups of each claim and of that version.
    """

    def __init__(
        self,
        group_size: int,
        groups: Sequence[tuple[GroupMeta, int]],
        *,
        before: Callable[[Sequence[GroupMeta], int], None],
    ) -> None:
        super().__init__(clock=virtual_clock, group_size=group_size)
        self._waiting = deque(groups)
        self._before = before

    @property
    def empty(self) -> bool:
        return not self._waiting

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        chosen: list[GroupMeta] = []
        version = self._waiting[0][1] if self._waiting else 0
        while self._waiting and len(chosen) < max_groups and self._waiting[0][1] == version:
            chosen.append(self._waiting.popleft()[0])
        if not chosen:
            return Claim(claim_id, partition, consumer, owner, 0, ())
        self._before(chosen, version)
        return await self.put_and_claim(chosen, owner=owner, claim_id=claim_id)


class _WhatIf:
    """One other run over the recorded claims."""

    def __init__(self, recording: Recording, config: RunConfig, chain: Chain) -> None:
        self._recording = recording
        self._config = config
        self._chain = chain
        self._figures = RunReport()
        # Without it, what the filters of this chain drop for age would count as lost to something else.
        self._figures.apply(_started(config, chain))
        self._events: list[AnyEvent] = []
        self._outside = _outside(recording)
        self._log_ratios: dict[str, Any] = {}
        for event in recording.events:
            if isinstance(event, Measured):
                self._log_ratios.update(unwritten(event.log_ratios))
        self._plane = _Stream(config.rollout.group_size, _judged_groups(recording), before=self._bring_about)
        self._machinery = Machinery(
            without_limits(config),
            chain=chain,
            cost=recording.cost,
            plane=self._plane,
            ranks=replay_ranks(config, chain, measured=self._measured),
            generators=(),  # No version is published here, so none that a generator serves holds the trainer up.
            folds=[self._figures, self],
            more_may_come=lambda: not self._plane.empty,
        )

    def apply(self, event: AnyEvent) -> None:
        self._events.append(event)

    async def _measured(self) -> Mapping[str, Any]:
        return self._log_ratios

    async def run(self, before: RunReport) -> Answer:
        await self._plane.start()
        ended = self._recording.ended
        whole = ended is not None and ended.reason == DATA_EXHAUSTED
        note, core = "", self._machinery.core
        try:
            while not self._plane.empty and core.limit() is None:
                batch = await core.assemble()
                if batch is None or (not self._is_complete(batch) and not whole):
                    break
                trained = await core.run(batch)
                if trained is not None:
                    core.published(trained.version)
            if core.limit() == LIMIT_STEPS and not self._plane.empty:
                # A run judges one batch ahead of its trainer, and so one that comes too late to be trained.
                await core.assemble()
        except (RefillExhausted, NothingLearned) as error:
            note = str(error)
        for group in [group for group in self._outside if group not in self._machinery.groups_seen]:
            self._arrive(group)
        await core.groups.settle_rest()
        return Answer(before, self._figures, self._events, note)

    def _is_complete(self, batch: Batch) -> bool:
        """Whether a batch has all groups that it asks for, and was not cut short by the end of the log."""
        have = batch.judged if self._chain.refill is None else batch.kept
        return len(have) >= self._config.rollout.groups_per_step or batch.partial

    def _bring_about(self, groups: Sequence[GroupMeta], version: int) -> None:
        """Let groups arrive for a claim that was judged for `version`."""
        self._machinery.core.versions.jump_to(version)
        for group in groups:
            self._arrive(group.group)

    def _arrive(self, group: int) -> None:
        for event in self._outside.pop(group, ()):
            self._machinery.feed(event)


def _started(config: RunConfig, chain: Chain) -> RunStarted:
    return RunStarted(schema=SCHEMA, config=config.model_dump(), software={}, age_reasons=chain.age_reasons)


def _judged_groups(recording: Recording) -> list[tuple[GroupMeta, int]]:
    """Return the groups in the order of their claims, each with the version for which it was judged.

    A group that was claimed again, since its first claim ended without a fate, stands where it was claimed last.
    """
    groups: dict[int, GroupMeta] = {}
    ages: dict[int, int] = {}
    order: dict[int, None] = {}
    claims = judged_claims(recording.events)
    for event in recording.events:
        match event:
            case Put():
                groups[event.group] = GroupMeta(tuple(event.keys), unwritten(event.tags))
            case Claimed() if event.seq in claims:
                for group in claims[event.seq].groups:
                    order.pop(group, None)
                    order[group] = None
            case Judged():
                ages[event.group] = event.age
    return [
        (groups[group], groups[group].version + ages[group]) for group in order if group in ages and group in groups
    ]


def _outside(recording: Recording) -> dict[int, list[AnyEvent]]:
    """Return, by group, the events that say what became of it before any claim."""
    found: dict[int, list[AnyEvent]] = {}
    for event in recording.events:
        match event:
            case Dispatched():
                found[event.group] = [event]
            case Put() | GroupFailed() | Settled() if event.group in found:
                found[event.group].append(event)
    return found
