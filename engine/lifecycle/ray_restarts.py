"""Replaces actors of a run on Ray, and knows which are of now.

Invariant: an actor is started only once the process before it is gone: two of one name would put the same groups. And
what is running is known before it is waited for, so that it is ended with the run.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio
import ray

from asyncrl.engine.deployment import CollectorHandle
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.lifecycle.ray_handles import RemoteActor, RemoteCollector
from asyncrl.engine.records.ending import first_cause

_LOOK_EVERY_S = 1.0
_STOP_S = 5.0

Start = Callable[[], RemoteCollector]
Connect = Callable[[RemoteCollector], Awaitable[None]]


class RayRestarter:
    """Restarts what it has started; `connect` attaches it, within `start_s`. Of `is_lost` the place is gone."""

    def __init__(
        self, connect: Connect, *, start_s: float, is_lost: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._connect = connect
        self._start_s = start_s
        self._is_lost = is_lost
        self._starts: dict[str, Start] = {}
        self._running: dict[str, RemoteActor] = {}

    def add(self, actors: Iterable[RemoteActor]) -> None:
        """Know actors that end with the run."""
        self._running.update({actor.name: actor for actor in actors})

    def start(self, name: str, start: Start) -> RemoteCollector:
        """Start an actor, which `restart` will start in the same way."""
        self._starts[name] = start
        started = self._running[name] = start()
        return started

    async def restart(self, name: str) -> CollectorHandle:
        await self._running[name].end()
        return await self.begin(name, self._starts[name])

    async def end(self, name: str) -> None:
        """End an actor for good, in order if it answers; idempotent."""
        actor, _ = self._running.pop(name, None), self._starts.pop(name, None)
        if actor is None:
            return
        if isinstance(actor, RemoteCollector):
            # Its engine and the processes that score end with it, also where no task can be started beside it.
            with anyio.move_on_after(_STOP_S), suppress(ActorDied, ray.exceptions.RayError):
                await actor.stop()
        await actor.end()

    async def begin(self, name: str, start: Start) -> RemoteCollector:
        """Start an actor and attach it; ActorDied or Overdue if that fails."""
        another = self.start(name, start)
        try:
            with anyio.fail_after(self._start_s):
                await self._connect_unless_lost(another)
        except TimeoutError as error:
            if isinstance(error, Overdue):
                raise
            raise Overdue(f"{name} did not start within {self._start_s:g} s (supervision.start_timeout_s)") from None
        return another

    async def _connect_unless_lost(self, another: RemoteCollector) -> None:
        """Attach an actor; ActorDied if its node is lost, for which Ray would wait for ever."""
        lost = False

        async def watch(scope: anyio.CancelScope) -> None:
            nonlocal lost
            while not lost:
                lost = self._is_lost(another.name)
                await anyio.sleep(0 if lost else _LOOK_EVERY_S)
            scope.cancel()

        try:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch, scope)
                    await self._connect(another)
                    tasks.cancel_scope.cancel()
        except ExceptionGroup as failed:  # What connecting raised, alone as it was.
            raise first_cause(failed) from failed
        if lost:
            raise ActorDied(f"{another.name} died with its node, where its place was", actor=another.name)

    def kill(self, name: str) -> None:
        if name in self._running:  # It may have left.
            self._running[name].kill()

    def kill_all(self) -> None:
        """End every actor of now, without waiting."""
        for actor in self._running.values():
            actor.kill()
