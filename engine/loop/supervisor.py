"""Supervision of collectors, and of the one that evaluates: a dead one is replaced while all others go on.

    works ──death──▶ let go ──▶ buried ──pause──▶ started ──weights──▶ works
                       │                             │ dies again
                       └── budget used up: the run's death ◀──┘

A collector may also leave, if the deployment has a roster: once it has nothing in flight, or because its node is lost
(elasticity.py). Then none comes in its place. And others join: from `weights` on they are like a successor.

let go   at once, with the event: no grant and no publish reaches it, what is published no longer waits for it.
buried   groups that it had put whole stay; the others have the fate `failed:collector_died`, their prompts come again.
started  another process in its place, by the deployment's restarter.
weights  the newest version that was published; then the others' publishes reach it too, and it is granted groups.

Invariant: every group of a dead collector arrives or is settled once, before its successor is granted anything; no
grant of the dead one reaches the successor.
"""

from contextlib import suppress
from dataclasses import dataclass

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.configs.sections.run import Supervision
from asyncrl.engine.deployment import EVALUATOR, CollectorHandle, Restarter, Roster
from asyncrl.engine.errors import ActorDied, EngineDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import ActorRestarted, CollectorAdded, CollectorJoined, CollectorLeft
from asyncrl.engine.lifecycle.deaths import Deaths, is_death
from asyncrl.engine.loop.collectors import Collectors, Member
from asyncrl.engine.loop.core import Core
from asyncrl.engine.loop.listener import Listener
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.restarts import Restarts
from asyncrl.engine.records.ending import first_cause

log = structlog.get_logger()


@dataclass(slots=True)
class _Loss:
    """What a death cost: since when there is nobody, and which groups were lost."""

    since: float
    groups: list[int]


class Supervisor:
    """Attends to every collector; with a `restarter`, and once it is opened, it replaces those that die."""

    def __init__(
        self,
        settings: Supervision,
        collectors: Collectors,
        restarter: Restarter | None,
        roster: Roster | None = None,
        *,
        core: Core,
        publisher: Publisher,
        events: EventLog,
    ) -> None:
        self._settings = settings
        self._collectors = collectors
        self._restarter = restarter
        self._groups = core.groups
        self._versions = core.versions
        self._publisher = publisher
        self._engine_uses = core.engine_uses
        self._events = events
        self._open = False
        self._names = {member.name for member in collectors.all()}
        self._restarts: dict[str, Restarts] = {}
        self._losses: dict[str, _Loss] = {}
        self._roster = roster
        self._newcomers: set[str] = set()
        self._leaving: set[str] = set()
        self.deaths = Deaths(events, survives=self._let_go)

    @property
    def being_restarted(self) -> list[str]:
        """The collectors that died and have no successor at work yet."""
        return sorted(self._losses)

    def restarts_of(self, name: str) -> Restarts:
        """Return the policy of a part, which every one has of its own."""
        settings = self._settings
        if name not in self._restarts:
            self._restarts[name] = Restarts(
                settings.restarts,
                window_s=settings.restart_window_s,
                pause_s=settings.restart_pause_s,
                now=lambda: self._events.now,
            )
        return self._restarts[name]

    def attend(self, tasks: TaskGroup, listener: Listener) -> None:
        """Run every collector in `tasks`, and hear what it says."""
        for member in self._collectors.all():
            tasks.start_soon(self._attend, member, listener)

    def admit(self, handle: CollectorHandle, tasks: TaskGroup, listener: Listener) -> None:
        """Run one more collector in `tasks`; it takes part once it serves what is published."""
        self._names.add(handle.name)
        self._newcomers.add(handle.name)
        self._events.append(CollectorAdded(collector=handle.name))
        tasks.start_soon(self._attend, self._collectors.add(handle), listener)

    def give_up(self, name: str) -> None:
        """From now on, if this collector dies, none comes in its place: it is about to leave."""
        self._leaving.add(name)

    def open(self) -> None:
        """From now on a death is made good; one during the start tells of something that is wrong from the start."""
        self._open = self._collectors.are_replaced = self._restarter is not None

    def close(self) -> None:
        """From now on nothing is replaced, because the run ends."""
        self._open = self._collectors.are_replaced = False

    async def _attend(self, first: Member, listener: Listener) -> None:
        """Run a collector, and whoever comes in its place, until it has left, or cancelled."""
        name, member = first.name, first
        while True:
            try:
                async with anyio.create_task_group() as life:
                    life.start_soon(listener.listen, member.handle)
                    life.start_soon(self._run, member.handle)
                    life.start_soon(self._hear_of_death, member)
                    life.start_soon(_until_dismissed, member, life.cancel_scope)
                    if not member.joined:
                        life.start_soon(self._welcome, member)
            except Exception as error:  # The collector's supervision edge.
                if not (is_death(error) and self.deaths.survived(name)):
                    self._explain(name, error)
                    raise
                listener.forget(name)
                another = await self._replace(name, error)
                if another is not None:
                    member = another
                    continue
            await self._depart(name)
            return

    def _explain(self, name: str, error: Exception) -> None:
        """Say of a death that ends the run how often there was another chance."""
        if self._open and is_death(error):
            settings = self._settings
            first_cause(error).add_note(
                f"{name} was restarted {settings.restarts} times within {settings.restart_window_s:g} s before "
                "(supervision.restarts)"
                if settings.restarts
                else "supervision.restarts is 0, by which no actor is restarted"
            )

    async def _run(self, handle: CollectorHandle) -> None:
        with self.deaths.of(handle.name):
            await handle.run()

    async def _hear_of_death(self, member: Member) -> None:
        with self.deaths.of(member.name):
            await member.death()

    def _let_go(self, name: str, error: Exception) -> bool:
        """Let a dead collector go, if it can be replaced; return whether it can."""
        if not (self._can_replace(name) and is_death(error)):
            return False
        if name not in self._leaving and self.restarts_of(name).used_up:
            return False
        self._collectors.remove(name)
        self._versions.leave(name)
        self._engine_uses.forget(name)
        self._losses.setdefault(name, _Loss(self._events.now, []))
        return True

    def _can_replace(self, name: str) -> bool:
        # Evaluations go on beyond the end of training.
        return self._restarter is not None if name == EVALUATOR else self._open and name in self._names

    async def replace_evaluator(self, error: Exception) -> CollectorHandle:
        """Return who evaluates in place of one that ended with `error`; raises that if there can be nobody."""
        with suppress(ActorDied, EngineDied, ExceptionGroup), self.deaths.of(EVALUATOR):
            raise error
        if not self.deaths.survived(EVALUATOR):
            raise error
        try:
            handle = await self._start_in_place(EVALUATOR, error)
            if handle is None:  # Its node is lost.
                raise error
            self._note_restart(EVALUATOR)
            return handle
        finally:
            self._losses.pop(EVALUATOR, None)  # Else it would be restarted for ever, to whoever asks.

    async def _replace(self, name: str, error: Exception) -> Member | None:
        """Bury a collector, and start another in its place, as often as the policy allows; None if it is to leave."""
        self._losses[name].groups += await self._groups.bury(name, _first_line(first_cause(error)))
        another = await self._start_in_place(name, error)
        return None if another is None else self._collectors.add(another)

    async def _depart(self, name: str) -> None:
        """Go on without a collector."""
        self._collectors.remove(name)
        self._versions.leave(name)
        self._engine_uses.forget(name)
        self._names.discard(name)
        self._newcomers.discard(name)
        loss = self._losses.pop(name, None)
        self._events.append(CollectorLeft(collector=name))
        log.info("a collector has left", collector=name)
        self._groups.changed.notify()
        assert self._roster is not None
        await self._roster.dismiss(name)
        if loss is not None:
            await self._groups.clear_lost(loss.groups)

    def _is_to_leave(self, name: str) -> bool:
        return name in self._leaving or (self._roster is not None and self._roster.has_lost(name))

    async def _start_in_place(self, name: str, error: Exception) -> CollectorHandle | None:
        cause = first_cause(error)
        while not self._is_to_leave(name):
            pause_s = self.restarts_of(name).take()
            log.warning(
                "an actor died; another is started in its place",
                actor=name,
                cause=_first_line(cause),
                lost_groups=self._losses[name].groups,
                restart=self.restarts_of(name).count,
                of=self._settings.restarts,
                pause_s=pause_s,
            )
            await anyio.sleep(pause_s)
            self.deaths.forget(name)
            try:
                with self.deaths.of(name):
                    return await self._start_another(name)
            except ActorDied as again:
                if not self.deaths.survived(name):
                    self._explain(name, again)
                    raise
                cause = again
        return None

    async def _start_another(self, name: str) -> CollectorHandle:
        assert self._restarter is not None
        try:
            return await self._restarter.restart(name)
        except Overdue as error:
            raise ActorDied(f"{name} could not be started again: {error}", actor=name) from error

    async def _welcome(self, member: Member) -> None:
        """Bring a successor to what is published; then it takes part."""
        try:
            version = await self._publisher.catch_up(member)
        except ActorDied as error:
            if error.actor != member.name:  # That of a rank ends the run.
                raise
            member.report(error)
            return
        if member.name in self._leaving:
            return  # It is granted nothing, and leaves at once.
        # What a dead one had sent may have come to the data plane after it was buried.
        loss = self._losses.get(member.name)
        await self._groups.clear_lost(loss.groups if loss is not None else [])
        log.info("a collector has joined", collector=member.name, version=version)
        if member.name in self._newcomers:
            self._newcomers.remove(member.name)
            self._losses.pop(member.name, None)
            self._events.append(CollectorJoined(collector=member.name))
        else:
            self._note_restart(member.name)
        self._groups.changed.notify()

    def _note_restart(self, name: str) -> None:
        loss, count = self._losses.pop(name), self.restarts_of(name).count
        seconds = round(self._events.now - loss.since, 6)
        self._events.append(ActorRestarted(actor=name, restart=count, seconds=seconds))
        log.info("an actor works again", actor=name, restart=count, seconds=seconds)


async def _until_dismissed(member: Member, life: anyio.CancelScope) -> None:
    await member.dismissal()
    life.cancel()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
