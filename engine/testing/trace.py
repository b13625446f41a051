"""Scripts for a collector, and what the real front end, chain and planner make of them.

    played = play([put([0, 1]), put([1, 1]), version(3), put([0, 1], version=1)], filters=[MyFilter()])
    assert played.verdicts == {0: None, 1: "zero_std", 2: "stale"}

A script says what a collector does, one entry after the other, on the virtual clock: `put` a group,
serve a `version`, `hang` on a group, `fail` with one, `finish`. Groups are numbered from 0.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec

from asyncrl.configs import Override, RunConfig, load
from asyncrl.configs.named_code import code_of
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.types import (
    SCHEMA,
    AnyEvent,
    Judged,
    Planned,
    RunEnded,
    RunStarted,
    Settled,
    StepStarted,
)
from asyncrl.engine.lifecycle.parts import train_partition
from asyncrl.engine.records.ending import DATA_EXHAUSTED, Ending, failure, first_cause
from asyncrl.engine.records.work import TrainWork
from asyncrl.engine.running.seal import sealed_code
from asyncrl.engine.testing.golden import TraceChanged, compare_with_golden
from asyncrl.engine.testing.script import Entry, PutGroup, check_script, fail, finish, hang, put, version
from asyncrl.engine.testing.scripted_collector import COLLECTOR, ScriptedCollector, acknowledge
from asyncrl.engine.testing.simulation import Outcome
from asyncrl.engine.trace.cutting import write_log
from asyncrl.engine.trace.machinery import Machinery, replay_ranks
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay
from asyncrl.engine.trace.what_if import what_if
from asyncrl.filters import BaseRolloutFilter, Chain, build_chain

__all__ = [
    "Entry",
    "Played",
    "ScriptedCollector",
    "TraceChanged",
    "compare_with_golden",
    "fail",
    "finish",
    "hang",
    "play",
    "play_log",
    "put",
    "recording_of",
    "script_config",
    "seeded_delays",
    "version",
]

_OWN = ("max_staleness", "groups_per_step", "filters", "step_seconds")


def seeded_delays(seed: int, *, mean_s: float = 1.0, spread: float = 0.5) -> Callable[[int], float]:
    """Return seconds by number of a call, log-normal, the same for the same seed: for fakes' `seconds`."""

    def seconds(call: int) -> float:
        return mean_s * random.Random(f"{seed}/{call}").lognormvariate(-spread * spread / 2, spread)

    return seconds


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
    """Load the default preset for a script; `trainer__ranks=2` sets trainer.ranks.

    TypeError if an entry or a setting does not exist; ConfigError if a value is out of range.
    """
    for name in settings:
        if "__" not in name and name not in ("filters",):
            raise TypeError(
                f"there is no setting {name!r}; it could be {', '.join(_OWN)}, or section__name of any value"
            )
    check_script(script)
    given = {
        "rollout.group_size": next((len(entry.rewards) for entry in script if isinstance(entry, PutGroup)), 2),
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
    **settings: Any,
) -> Played:
    """Play a script against the real front end, chain, planner and register of groups, in virtual time.

    `filters` stand in for the default chain (staleness, zero_std). A step takes `step_seconds(step)`,
    and the collector serves its version at once. `settings` are those of `script_config`.
    """
    used = script_config(script, **settings)
    chain = (
        build_chain(used.filters, min_live=used.rollout.min_live)
        if filters is None
        else Chain(filters, min_live=used.rollout.min_live)
    )

    async def main() -> Played:
        return await _Play(script, used, chain, step_seconds).run()

    try:
        return run_virtual(main)
    except ExceptionGroup as group:
        raise first_cause(group) from None


def play_log(
    path: Path,
    *,
    filters: Sequence[BaseRolloutFilter] | None = None,
    allow_code: Sequence[str] = (),
    **settings: Any,
) -> Played:
    """Replay a recorded log, which must be identical; with filters or settings, judge its claims again under them.

    `trainer__ranks=2` sets trainer.ranks. TraceChanged says where a plain replay differs; ConfigError names filters of
    the log's that are code (`module:Class`) and not in `allow_code`.
    """
    recording, allowed = Recording.read(path), [*allow_code, *sealed_code(path)]
    if filters is None and not settings:
        replayed = replay(recording, allow_code=allowed)
        if replayed.difference is not None:
            raise TraceChanged(f"the replay of {path.name} differs at {replayed.difference}")
        events = replayed.events
    else:
        overrides = [Override(name.replace("__", "."), value, name) for name, value in settings.items()]
        config = recording.config(overrides)
        chain = None if filters is None else Chain(filters, min_live=config.rollout.min_live)
        events = what_if(recording, config, chain=chain, allow_code=[*allowed, *code_of(overrides)]).events
    ended = recording.ended
    return Played(events, Ending(1, "the log breaks off") if ended is None else Ending(ended.code, ended.reason))


class _Play:
    def __init__(
        self, script: Sequence[Entry], config: RunConfig, chain: Chain, step_seconds: Callable[[int], float]
    ) -> None:
        self._events: list[AnyEvent] = []
        self._config = config
        self._chain = chain
        self._plane = LocalPlane(clock=virtual_clock, lease_s=config.data_plane.lease_s)

        async def trained(work: TrainWork) -> None:
            await anyio.sleep(step_seconds(work.step))

        self._machinery = Machinery(
            config,
            chain=chain,
            cost=None,
            plane=self._plane,
            ranks=replay_ranks(config, chain, trained=trained),
            generators=[COLLECTOR],
            folds=[self],
            more_may_come=lambda: not self._collector.finished,
        )
        self._collector = ScriptedCollector(
            script, plane=self._plane, machinery=self._machinery, group_size=config.rollout.group_size
        )

    def apply(self, event: AnyEvent) -> None:
        self._events.append(event)

    async def run(self) -> Played:
        machinery, ending = self._machinery, Ending(0, DATA_EXHAUSTED)
        machinery.log.append(_started(self._config, self._chain.age_reasons))
        await self._plane.register(train_partition(self._config))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collector.run)
            try:
                await self._train()
            except Exception as error:  # What a filter or the front end raises is what was asked for.
                ending = failure(error)
            tasks.cancel_scope.cancel()
        await machinery.core.groups.settle_rest()
        machinery.log.append(RunEnded(code=ending.code, reason=ending.reason))
        return Played(self._events, ending)

    async def _train(self) -> None:
        core = self._machinery.core
        while (batch := await core.assemble()) is not None:
            trained = await core.run(batch)
            acknowledge(self._machinery)
            if trained is not None:
                core.published(trained.version)


def recording_of(outcome: Outcome) -> Recording:
    """Return a simulated run as the recording that `asyncrl train` would have left."""
    started = _started(outcome.config, outcome.age_reasons)
    ended = RunEnded(seq=len(outcome.events) + 1, code=outcome.ending.code, reason=outcome.ending.reason)
    last = outcome.events[-1]
    return Recording([started, *outcome.events, msgspec.structs.replace(ended, t=last.t, wall=last.wall)])


def _started(config: RunConfig, age_reasons: tuple[str, ...]) -> RunStarted:
    return RunStarted(schema=SCHEMA, config=config.model_dump(), software={}, age_reasons=age_reasons)
