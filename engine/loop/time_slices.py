"""Devices in turns: generators sleep while the ranks train, and the ranks sleep while generators generate.

    generate ──a batch is ready──▶ generators sleep ──▶ ranks wake ──▶ train
       ▲                                                                 │
       └── generators wake ◀── new weights are published ◀── ranks sleep ◀┘

What sleeps keeps all in the host's memory; a generator takes new weights there. Ages, claims and verdicts know nothing
of it. Of a run without `cluster.time_slicing` each call returns at once.

Invariant: the ranks are awake only while each generator sleeps or is gone, and none is started meanwhile. A generator
that does not hand over in time is dead, and replaced as any other; a rank that does not ends the run.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import anyio

from asyncrl.collectors.engines.base import Cache
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.deployment import EVALUATOR, CollectorHandle, RankHandle, Restarter
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.loop.collectors import Collectors, Member

_STAGES = 3
"""Stages of a step at most, each within `trainer.step_timeout_s`: log-probabilities, reference, training."""


@dataclass(frozen=True, slots=True)
class SliceSettings:
    """What happens to a generator's cache, and seconds: of a handover, of the first one, of a slice and of restarts."""

    cache: Cache | None
    handover_s: float
    first_s: float
    slice_s: float
    restarts_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "SliceSettings":
        trainer, supervision = config.trainer, config.supervision
        # A batch that is to be exact ends first, within the time of a group.
        handover_s = trainer.publish_timeout_s + config.collector.group_timeout_s
        publish_s = trainer.publish_timeout_s * trainer.publish_tries
        return cls(
            config.cluster.time_slicing,
            handover_s=handover_s,
            # Before its first token an engine may compile.
            first_s=handover_s + supervision.start_timeout_s,
            slice_s=_STAGES * trainer.step_timeout_s + publish_s + 2 * handover_s,
            restarts_s=supervision.restart_window_s,
        )


class TimeSlices:
    """Whose turn it is. `changed` tells of a collector that has joined; `restarter` starts it, once it is its turn."""

    def __init__(
        self,
        settings: SliceSettings,
        collectors: Collectors,
        ranks: Sequence[RankHandle],
        *,
        restarter: Restarter | None,
        changed: Signal,
    ) -> None:
        self._settings = settings
        self._collectors = collectors
        self._ranks = ranks
        self._restarter = restarter
        self._turn: Literal["generate", "train"] = "generate"
        self._limit_s = settings.first_s
        self._starting: set[str] = set()
        self._changed = changed

    @property
    def restarter(self) -> Restarter | None:
        """Who starts actors in the place of dead ones, if anybody does; a collector is started in its turn alone."""
        if self._restarter is None or self._settings.cache is None:
            return self._restarter
        return _InTurn(self._restarter, self._let_start)

    async def train(self) -> None:
        """Have every generator sleep, then the ranks wake. Overdue, or ActorDied, if one of them does not."""
        if self._settings.cache is None:
            return
        await self._changed.wait_for(
            lambda: self._turn == "generate",
            timeout_s=self._settings.slice_s,
            what=lambda: "the generators have not come back to their devices",
        )
        while True:
            await self._changed.wait_for(
                lambda: not self._still_starting(),
                timeout_s=self._settings.restarts_s,
                what=lambda: f"the step waits for {', '.join(sorted(self._starting))} to be started again",
            )
            await self._have_all("sleep", self._fall_asleep)
            if not self._still_starting():
                break
        self._turn = "train"
        await self._have_ranks("wake", lambda rank: rank.wake())

    async def rest(self) -> None:
        """Have the ranks sleep, after a step."""
        if self._turn == "train":
            await self._have_ranks("sleep", lambda rank: rank.sleep())

    async def generate(self) -> None:
        """Have every generator go on; the ranks sleep."""
        if self._turn == "train":
            await self._have_all("wake", lambda member: member.wake())
            self._turn = "generate"
            self._changed.notify()

    async def _let_start(self, name: str) -> None:
        """Return once a collector may be started in a dead one's place, which takes memory of the device."""
        await self._changed.wait_for(
            lambda: self._turn == "generate",
            timeout_s=self._settings.slice_s,
            what=lambda: f"{name} waits for the ranks to leave its device",
        )
        self._starting.add(name)

    def _still_starting(self) -> bool:
        """Return whether a collector is being started that has not joined yet."""
        self._starting.difference_update(member.name for member in self._collectors)
        return bool(self._starting)

    async def _fall_asleep(self, member: Member) -> None:
        assert self._settings.cache is not None
        await member.sleep(self._settings.cache)

    async def _have_all(self, what: str, call: Callable[[Member], Awaitable[None]]) -> None:
        """Call every collector that lives; those that do not answer in time are dead."""
        late = {member.name: member for member in self._collectors if member.is_reachable}

        async def one(member: Member) -> None:
            await call(member)
            late.pop(member.name)

        with anyio.move_on_after(self._limit_s):
            async with anyio.create_task_group() as tasks:
                for member in list(late.values()):
                    tasks.start_soon(one, member)
        for name, member in late.items():
            limits = "trainer.publish_timeout_s and collector.group_timeout_s"
            why = f"{name} did not {what} within {self._limit_s:g} s ({limits})"
            if not self._collectors.are_replaced or self._restarter is None:
                raise Overdue(why)
            # It may only hang, with its memory still on the device.
            self._restarter.kill(name)
            member.report(ActorDied(why, actor=name))
        self._limit_s = self._settings.handover_s

    async def _have_ranks(self, what: str, call: Callable[[RankHandle], Awaitable[None]]) -> None:
        limit_s, late = self._settings.handover_s, {rank.name for rank in self._ranks}

        async def one(rank: RankHandle) -> None:
            await call(rank)
            late.remove(rank.name)

        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as tasks:
                for rank in self._ranks:
                    tasks.start_soon(one, rank)
        if late:
            raise Overdue(f"{', '.join(sorted(late))} did not {what} within {limit_s:g} s (trainer.publish_timeout_s)")


class _InTurn:
    """A restarter that starts no collector before `let_start` returns."""

    def __init__(self, restarter: Restarter, let_start: Callable[[str], Awaitable[None]]) -> None:
        self._restarter = restarter
        self._let_start = let_start

    async def restart(self, name: str) -> CollectorHandle:
        if name != EVALUATOR:  # It has its device all the time.
            await self._let_start(name)
        return await self._restarter.restart(name)

    def kill(self, name: str) -> None:
        self._restarter.kill(name)
