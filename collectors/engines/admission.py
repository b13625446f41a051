"""Which requests an engine works on: first come, first served, so many at once, and none while it is closed.

Invariant: a flight waits, or runs, or has left; whoever waits is told once, by its turn or by an end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import anyio

from asyncrl.collectors.engines.base import Finish
from asyncrl.engine.aio.signal import Signal


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way. `ending` is empty, or how it has to end although its engine has not said so."""

    request_id: str
    ending: Finish | None = None
    error: str = ""
    told: anyio.Event = field(default_factory=anyio.Event)


class Admission:
    """At most `limit()` flights run; while closed, as at the start, none begins to."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open = False
        self._waiting: deque[Flight] = deque()
        self._running: dict[Flight, None] = {}
        self._changed = Signal()
        self._end: tuple[Finish, str] | None = None

    @property
    def running(self) -> list[Flight]:
        return list(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, request_id: str) -> Flight:
        """Return once it is this request's turn, or once it has to end: see its `ending`. `leave` must follow."""
        flight = Flight(request_id)
        if self._end is not None:
            flight.ending, flight.error = self._end
            return flight
        self._waiting.append(flight)
        self.admit()
        with ExitStack() as undo:
            undo.callback(self.leave, flight)
            await flight.told.wait()
            undo.pop_all()
        return flight

    def leave(self, flight: Flight) -> None:
        """Give the place up, wherever the flight is."""
        self._running.pop(flight, None)
        if flight in self._waiting:
            self._waiting.remove(flight)
        self.tell()
        self.admit()

    def tell(self) -> None:
        """Have those who wait in `until` look again."""
        self._changed.notify()

    def open(self) -> None:
        self._open = True
        self.admit()

    def close(self) -> None:
        """Let nobody begin; who runs goes on."""
        self._open = False

    def admit(self) -> None:
        """Give turns while there is room: to be called when `limit()` has changed."""
        self.tell()
        while self._open and self._waiting and len(self._running) < self._limit():
            flight = self._waiting.popleft()
            self._running[flight] = None
            flight.told.set()

    def end_waiting(self, ids: Sequence[str] | None, ending: Finish = "abort", error: str = "") -> None:
        """End those that wait, of these requests or of all."""
        for flight in [flight for flight in self._waiting if ids is None or flight.request_id in ids]:
            self._waiting.remove(flight)
            flight.ending, flight.error = ending, error
            flight.told.set()

    def fail(self, error: str, *, ending: Finish = "error") -> None:
        """End those that wait in this way, and all to come with an error: the engine serves no more."""
        self._end = ("error", error)
        self.end_waiting(None, ending, error)

    async def drained(self) -> None:
        """Return once nobody runs. Its deadline is the caller's."""
        await self.until(lambda: not self._running)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds of the requests or the replicas. Its deadline is the caller's."""
        await self._changed.wait_until(condition)
