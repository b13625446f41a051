"""Scripts for a collector, and what the real front end, chain and planner make of them.

    played = play([put([0, 1]), put([1, 1]), version(3), put([0, 1], version=1)], filters=[MyFilter()])
    assert played.verdicts == {0: None, 1: "zero_std", 2: "stale"}

A script says what a collector does, one entry after the other, on the virtual clock: `put` a group,
serve a `version`, `hang` on a group, `fail` with one, `finish`. Groups are numbered from 0.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch

from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.ending import DATA_EXHAUSTED, Ending, failure
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import (
    SCHEMA,
    Acknowledged,
    AnyEvent,
    BatchGivenUp,
    BatchTaken,
    Judged,
    Planned,
    RunEnded,
    RunStarted,
    Settled,
    StepStarted,
)
from asyncrl.engine.lifecycle.base import PARTITION
from asyncrl.engine.lifecycle.parts import train_partition
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.columns import LOGPROBS, TOKENS
from asyncrl.engine.records.work import RankWork
from asyncrl.engine.testing.simulation import Outcome
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.difference import differences, title
from asyncrl.engine.trace.forced_plane import FOR_EVER_S
from asyncrl.engine.trace.machinery import Machinery
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.engine.trace.what_if import what_if
from asyncrl.engine.virtual_time import run_virtual, virtual_clock
from asyncrl.filters import BaseRolloutFilter, Chain, build_chain
from asyncrl.filters.testing import make_group

COLLECTOR = "collector0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a collector does, after `seconds` on the virtual clock."""

    seconds: float = field(default=1.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class PutGroup(Entry):
    """Put a group of which these are the rewards; without a version it has the one served."""

    rewards: Sequence[float | None]
    version: int | None = None
    prompt: int | None = None
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetVersion(Entry):
    """Bring trainer and collector to a version, as if other batches had been trained."""

    version: int


@dataclass(frozen=True, slots=True)
class HangGroup(Entry):
    """Take up a group and never end it."""


@dataclass(frozen=True, slots=True)
class FailGroup(Entry):
    """Take up a group and fail with it."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class EndOfData(Entry):
    """Say that no more groups will come."""


def put(
    rewards: Sequence[float | None],
    *,
    version: int | None = None,
    prompt: int | None = None,
    seconds: float = 1.0,
    **tags: Any,
) -> PutGroup:
    """Put a group; keywords are those of `make_group` (lengths, failed, truncated) and further tags."""
    return PutGroup(rewards, version, prompt, tags, seconds=seconds)


def version(number: int, *, seconds: float = 1.0) -> SetVersion:
    """Bring trainer and collector to a version; ones that they have passed change nothing."""
    return SetVersion(number, seconds=seconds)


def hang(*, seconds: float = 1.0) -> HangGroup:
    """Take up a group that never ends."""
    return HangGroup(seconds=seconds)


def fail(
    error: str = "RuntimeError: no answer", *, reason: str = "generation_error", seconds: float = 1.0
) -> FailGroup:
    """Fail with a group, as when its generator or its reward raises."""
    return FailGroup(reason, error, seconds=seconds)


def finish(*, seconds: float = 0.0) -> EndOfData:
    """End the data. A script without it ends its data after its last entry."""
    return EndOfData(seconds=seconds)


def seeded_delays(seed: int, *, mean_s: float = 1.0, spread: float = 0.5) -> Callable[[int], float]:
    """Return seconds by number of a call, log-normal, the same for the same seed: for fakes' `seconds`."""

    def seconds(call: int) -> float:
        return mean_s * random.Random(f"{seed}/{call}").lognormvariate(-spread * spread / 2, spread)

    return seconds


class ScriptedCollector:
    """Plays a script into a data plane and a register of groups, as a collector's messages would."""

    def __init__(self, script: Sequence[Entry], *, plane: DataPlane, machinery: Machinery, group_size: int) -> None:
        self._script = script
        self._plane = plane
        self._machinery = machinery
        self._group_size = group_size
        self._numbers = count()
        self.finished = False
        self.training = False

    async def run(self) -> None:
        """Do all entries in order; then the data is at its end."""
        for entry in self._script:
            await anyio.sleep(entry.seconds)
            await self._do(entry)
        self._finish()

    async def _do(self, entry: Entry) -> None:
        groups = self._machinery.groups
        match entry:
            case PutGroup():
                number = self._dispatch(entry.prompt)
                group = self._group(entry, number)
                await self._plane.put(PARTITION, group, _columns(group))
                groups.arrive(group, seconds=entry.seconds)
            case HangGroup():
                self._dispatch(None)
            case FailGroup():
                groups.fail(self._dispatch(None), entry.reason, entry.error)
            case SetVersion():
                # A step that runs ends at its own version first.
                await groups.changed.wait_at_most(lambda: not self.training, FOR_EVER_S)
                self._machinery.set_version(entry.version)
                acknowledge(self._machinery)
            case EndOfData():
                self._finish()

    def _finish(self) -> None:
        self.finished = True
        self._machinery.groups.changed.notify()

    def _dispatch(self, prompt: int | None) -> int:
        number = next(self._numbers)
        grant = Grant(number, Prompt(number if prompt is None else prompt, ""), self._group_size, 0)
        self._machinery.groups.dispatch(grant, COLLECTOR, served=self._machinery.versions.served[COLLECTOR])
        return number

    def _group(self, entry: PutGroup, number: int) -> GroupMeta:
        served = self._machinery.versions.served[COLLECTOR]
        tags = {"prompt": number if entry.prompt is None else entry.prompt, **entry.tags}
        return make_group(
            entry.rewards, group=number, version=served if entry.version is None else entry.version, **tags
        )


def acknowledge(machinery: Machinery) -> None:
    """Let the collector serve the trainer's version."""
    newest = machinery.versions.trainer
    if machinery.versions.served[COLLECTOR] < newest:
        machinery.versions.acknowledge(COLLECTOR, newest)
        machinery.log.append(Acknowledged(generator=COLLECTOR, version=newest))


def _columns(group: GroupMeta) -> dict[str, list[torch.Tensor]]:
    prompt = group.prompt_tokens
    return {
        TOKENS: [torch.zeros(prompt + length, dtype=torch.int32) for length in group.response_tokens],
        LOGPROBS: [torch.zeros(length, dtype=torch.float32) for length in group.response_tokens],
    }


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a script: all events, and the ending. It can be written as a log and replayed."""

    events: Sequence[AnyEvent]
    ending: Ending

    @property
    def error(self) -> BaseException | None:
        """What ended it, if not the end of the data."""
        return self.ending.error

    @property
    def verdicts(self) -> dict[int, str | None]:
        """Groups in the order of their judgement, with the reason of the drop, None for kept."""
        return {event.group: event.dropped for event in self.events if isinstance(event, Judged)}

    @property
    def masked(self) -> dict[int, dict[int, str]]:
        """By group: samples that a filter masked, and why."""
        return {event.group: event.masked for event in self.events if isinstance(event, Judged) and event.masked}

    @property
    def fates(self) -> dict[int, list[str]]:
        """By group: the fate of each sample."""
        return {event.group: event.fates for event in self.events if isinstance(event, Settled)}

    @property
    def steps(self) -> list[list[int]]:
        """The groups of each step."""
        return [event.groups for event in self.events if isinstance(event, StepStarted)]

    @property
    def plans(self) -> list[list[list[list[str]]]]:
        """Of each step: by rank, by micro-batch, the keys."""
        return [event.ranks for event in self.events if isinstance(event, Planned)]

    @property
    def ledger(self) -> Ledger:
        ledger = Ledger()
        for event in self.events:
            ledger.apply(event)
        return ledger

    def write(self, path: Path) -> None:
        """Write the events as a log that every asyncrl command reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_log(path, self.events)


def script_config(
    script: Sequence[Entry], *, max_staleness: int = 2, groups_per_step: int = 1, **settings: Any
) -> RunConfig:
    """Load the default preset for a script; `trainer__ranks=2` sets trainer.ranks."""
    sizes = {len(entry.rewards) for entry in script if isinstance(entry, PutGroup)} or {2}
    if len(sizes) > 1:
        raise ValueError(f"groups of {sorted(sizes)} samples in one script; all groups of a run have one size")
    given = {
        "rollout.group_size": sizes.pop(),
        "rollout.max_staleness": max_staleness,
        "rollout.groups_per_step": groups_per_step,
        "trainer.ranks": 1,
        **{path.replace("__", "."): value for path, value in settings.items()},
    }
    return load("default", [Override(path, value, path) for path, value in given.items()]).config


def play(
    script: Sequence[Entry],
    *,
    filters: Sequence[BaseRolloutFilter] | None = None,
    step_seconds: Callable[[int], float] = lambda step: 0.0,
    config: RunConfig | None = None,
    **settings: Any,
) -> Played:
    """Play a script against the real front end, chain, planner and register of groups, in virtual time.

    `filters` stand in for the default chain (staleness, zero_std). A step takes `step_seconds(step)`,
    and the collector serves its version at once. `settings` are those of `script_config`.
    """
    used = config or script_config(script, **settings)
    chain = (
        build_chain(used.filters, min_live=used.rollout.min_live)
        if filters is None
        else Chain(filters, min_live=used.rollout.min_live)
    )

    async def main() -> Played:
        return await _Play(script, used, chain, step_seconds).run()

    return run_virtual(main)


def play_log(path: Path, *, filters: Sequence[BaseRolloutFilter] | None = None, **settings: Any) -> Played:
    """Replay a recorded log, which must be identical; with filters or settings, judge its claims again under them.

    `trainer__ranks=2` sets trainer.ranks. TraceChanged says where a plain replay differs.
    """
    recording = Recording.read(path)
    if filters is None and not settings:
        replayed = replay(recording)
        if replayed.difference is not None:
            raise TraceChanged(f"the replay of {path.name} differs at {replayed.difference}")
        events = replayed.events
    else:
        overrides = [Override(name.replace("__", "."), value, name) for name, value in settings.items()]
        config = recording.config(overrides)
        chain = None if filters is None else Chain(filters, min_live=config.rollout.min_live)
        events = what_if(recording, config, chain=chain).events
    ended = recording.ended
    return Played(events, Ending(1, "the log breaks off") if ended is None else Ending(ended.code, ended.reason))


class _Play:
    def __init__(
        self, script: Sequence[Entry], config: RunConfig, chain: Chain, step_seconds: Callable[[int], float]
    ) -> None:
        self._events: list[AnyEvent] = []
        self._config = config
        self._plane = LocalPlane(clock=virtual_clock, lease_s=config.data_plane.lease_s)
        self._machinery = Machinery(
            config,
            chain=chain,
            cost=None,
            plane=self._plane,
            generators=[COLLECTOR],
            folds=[self],
            more_may_come=lambda: not self._collector.finished,
            poll_s=config.data_plane.poll_s,
            starve_timeout_s=config.supervision.starve_timeout_s,
        )
        self._collector = ScriptedCollector(
            script, plane=self._plane, machinery=self._machinery, group_size=config.rollout.group_size
        )

        async def trained(work: RankWork) -> None:
            await anyio.sleep(step_seconds(work.step))

        for rank in self._machinery.ranks:
            rank.trained = trained

    def apply(self, event: AnyEvent) -> None:
        self._events.append(event)

    async def run(self) -> Played:
        machinery, ending = self._machinery, Ending(0, DATA_EXHAUSTED)
        machinery.log.append(RunStarted(schema=SCHEMA, config=self._config.model_dump(), software={}))
        await self._plane.register(train_partition(self._config))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collector.run)
            try:
                await self._train()
            except Exception as error:  # What a filter or the front end raises is what was asked for.
                ending = failure(error)
            tasks.cancel_scope.cancel()
        await machinery.groups.settle_rest()
        machinery.log.append(RunEnded(code=ending.code, reason=ending.reason))
        return Played(self._events, ending)

    async def _train(self) -> None:
        machinery = self._machinery
        while True:
            batch = await machinery.front_end.next_batch()
            if not batch.judged:
                return
            if batch.kept:
                machinery.log.append(BatchTaken(batch=batch.index))
                await machinery.front_end.hand_off(batch)
                self._collector.training = True
                if await machinery.step.run(batch, waited_s=0.0, poll_hits=0) is None:
                    machinery.log.append(BatchGivenUp(batch=batch.index))
                self._collector.training = False
            acknowledge(machinery)
            machinery.groups.release(batch.judged)


def recording_of(outcome: Outcome) -> Recording:
    """Return a simulated run as the recording that `asyncrl train` would have left."""
    started = RunStarted(schema=SCHEMA, config=outcome.config.model_dump(), software={})
    ended = RunEnded(seq=len(outcome.events) + 1, code=outcome.ending.code, reason=outcome.ending.reason)
    last = outcome.events[-1]
    return Recording([started, *outcome.events, msgspec.structs.replace(ended, t=last.t, wall=last.wall)])


class TraceChanged(AssertionError):
    """A run no longer makes the events of its golden trace; the message shows the first that differs."""


def compare_with_golden(events: Sequence[AnyEvent], golden: Path, *, refresh: bool = False) -> None:
    """Check events against a golden log, or write it anew; times and the configuration are passed over.

    TraceChanged shows the events before the first difference, and both sides of it.
    """
    if refresh:
        golden.parent.mkdir(parents=True, exist_ok=True)
        write_log(golden, events)
        return
    if not golden.exists():
        raise TraceChanged(f"there is no golden trace {golden.name} yet; run pytest with --refresh-traces to write it")
    expected = list(read_events(golden))
    for place in range(max(len(expected), len(events))):
        before = expected[place] if place < len(expected) else None
        after = events[place] if place < len(events) else None
        if isinstance(before, RunStarted) and isinstance(after, RunStarted):
            continue
        if before is None or after is None or type(before) is not type(after) or differences(before, after):
            raise TraceChanged("\n".join(_shown(golden, events, place, before, after)))


def _shown(
    golden: Path, events: Sequence[AnyEvent], place: int, before: AnyEvent | None, after: AnyEvent | None
) -> list[str]:
    lines = [f"event {place + 1} is not that of the golden trace {golden.name}:"]
    lines += [f"    {_line(event)}" for event in events[max(0, place - 3) : place]]
    lines += [f"  - {_line(before)}", f"  + {_line(after)}"]
    if before is not None and after is not None and type(before) is type(after):
        lines += [f"  {difference}" for difference in differences(before, after)]
    return [*lines, "run pytest with --refresh-traces to accept it"]


def _line(event: AnyEvent | None) -> str:
    if event is None:
        return "(nothing)"
    fields = msgspec.to_builtins(event)
    rest = {name: value for name, value in fields.items() if name not in ("type", "seq", "t", "wall", "config")}
    text = f"{title(event)}  {rest}"
    return text if len(text) <= 160 else f"{text[:157]}..."
