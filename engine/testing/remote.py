"""Processes as Ray shows them: a call takes its time to arrive, its answer to come back, and a caller that
gives up does not end its call.

Invariants: what was called acts, once, whatever becomes of its caller, unless its process dies first; a process
takes up its callers' calls in the order in which they were made. Who waits for a process that dies is told so,
also when the act was done and its answer on its way.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncrl.engine.data_plane.base import Column, DataPlane
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.errors import ActorDied
from asyncrl.engine.records import GroupMeta

Result = TypeVar("Result")

# Calls to one process that would arrive at the same instant: timers of one time ring in any order.
_APART_S = 1e-6
_here: "ContextVar[Process | None]" = ContextVar("process", default=None)
"""The process in which a task runs."""
_OPERATIONS = ("claim", "give_back", "renew", "leased", "read", "clear")


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds of the n-th call before it arrives, and of its answer; lists repeat from the start."""

    calls: Sequence[float] = (0.0,)
    answers: Sequence[float] = (0.0,)

    def of(self, number: int) -> tuple[float, float]:
        return self.calls[number % len(self.calls)], self.answers[number % len(self.answers)]


@dataclass(eq=False, slots=True)
class _Call:
    act: Callable[[], Awaitable[Any]]
    method: str
    arrives: float
    answer_s: float
    value: Any = None
    error: Exception | None = None
    acted: anyio.Event = field(default_factory=anyio.Event)
    answered: anyio.Event = field(default_factory=anyio.Event)


class Process:
    """Where calls act: in tasks of the world's, never in those of their callers.

    Calls to an actor arrive `in_order`; a data plane's clients overtake one another.
    """

    def __init__(self, name: str, tasks: TaskGroup, delays: Delays, *, in_order: bool = True) -> None:
        self.name = name
        self._delays = delays
        self._in_order = in_order
        self._numbers = count()
        self._last_arrival = 0.0
        self._waiting: dict[_Call, None] = {}
        self._life = anyio.create_task_group()
        self._dead = self._hangs = False
        tasks.start_soon(self._live)

    async def call(self, method: str, act: Callable[[], Awaitable[Any]]) -> Any:
        """Call, and wait for the answer; ActorDied if the process dies first."""
        delays = self._delays.of(next(self._numbers))
        if not self._in_order and not any(delays):
            return await act()
        call = self._send_call(method, act, delays)
        await call.answered.wait()
        if call.error is not None:
            raise call.error
        return call.value

    def send(self, method: str, act: Callable[[], Awaitable[Any]]) -> _Call:
        """Call without waiting."""
        return self._send_call(method, act, self._delays.of(next(self._numbers)))

    def _send_call(self, method: str, act: Callable[[], Awaitable[Any]], delays: tuple[float, float]) -> _Call:
        call_s, answer_s = delays
        now = anyio.current_time()
        arrives = now + call_s
        if self._in_order and self._last_arrival > now:
            arrives = max(arrives, self._last_arrival + _APART_S)
        self._last_arrival = arrives
        call = _Call(act, method, arrives, answer_s)
        self._waiting[call] = None
        if self._dead:
            if not self._hangs:
                self._lose(call)
        else:
            self._life.start_soon(self._serve, call)
        return call

    @property
    def is_dead(self) -> bool:
        return self._dead

    def kill(self, *, hangs: bool = False) -> None:
        """End everything that runs in the process; nothing that has not arrived will act.

        If it only `hangs`, who waits for it hears nothing, until it is killed.
        """
        self._dead = True
        self._life.cancel_scope.cancel()
        self._hangs = hangs
        if hangs:
            return
        for call in list(self._waiting):
            self._lose(call)

    def _lose(self, call: _Call) -> None:
        self._waiting.pop(call, None)  # Gone already if the process was killed meanwhile.
        call.error = ActorDied(f"{self.name} died during {call.method}: killed", actor=self.name)
        call.acted.set()
        call.answered.set()

    async def _live(self) -> None:
        async with self._life:
            await anyio.sleep_forever()

    async def _serve(self, call: _Call) -> None:
        if call.arrives > anyio.current_time():
            await anyio.sleep_until(call.arrives)
        _here.set(self)
        try:
            call.value = await call.act()
        except Exception as error:  # The actor's edge: the error is its caller's.
            call.error = error
        call.acted.set()
        if call.answer_s:
            await anyio.sleep(call.answer_s)
        self._waiting.pop(call, None)  # Gone already if the process was killed meanwhile.
        call.answered.set()


class DelayedActor:
    """A handle on a collector or rank that lives in a process."""

    def __init__(self, actor: Any, process: Process) -> None:
        self.name: str = actor.name
        self._actor = actor
        self._process = process

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._actor, method)

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await self._process.call(method, partial(target, *args, **kwargs))

        return called


class DelayedPlane(PassingPlane):
    """A client of a plane that lives in a process. A put that is given up cleans up after itself."""

    def __init__(self, plane: DataPlane, process: Process) -> None:
        super().__init__(plane)
        self._process = process

    async def _pass(self, operation: str, partition: str, call: Callable[[], Awaitable[Result]]) -> Result:
        if operation not in _OPERATIONS:
            return await call()
        answer: Result = await self._process.call(operation, call)
        return answer

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        call = self._process.send("put", partial(self._plane.put, partition, group, columns))
        try:
            await call.answered.wait()
        except anyio.get_cancelled_exc_class():
            here = _here.get()
            if here is not None and here.is_dead:
                raise  # A process that is killed cleans nothing: the put acts, or has acted, and nobody is told.
            with anyio.CancelScope(shield=True):
                await call.acted.wait()
                if call.error is None:
                    await self._plane.clear(partition, group.keys)
            raise
        if call.error is not None:
            raise call.error
        stored: GroupMeta = call.value
        return stored
