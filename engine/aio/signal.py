"""One primitive for waiting in this process: until a condition holds, with a deadline and an error.

Whoever changes what a condition reads calls `notify`; nothing polls.
"""

from collections.abc import Callable

import anyio

from asyncrl.engine.errors import Overdue


class Signal:
    """Wakes all waiters on `notify`; each looks at its own condition again."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Tell all waiters to look again."""
        self._event.set()
        self._event = anyio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` holds: for a task whose owner ends it, and so without a deadline of its own."""
        while not condition():
            await self._event.wait()

    async def wait_for(self, condition: Callable[[], bool], *, timeout_s: float, what: Callable[[], str]) -> None:
        """Return once `condition()` holds; Overdue after `timeout_s`, with what `what()` says of that moment."""
        if not await self.wait_at_most(condition, timeout_s):
            raise Overdue(f"{what()}: nothing for {timeout_s:g} s")

    async def wait_at_most(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether `condition()` came to hold within `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self.wait_until(condition)
        return condition()

    def statistics(self) -> anyio.EventStatistics:
        """Return how many tasks wait now (`tasks_waiting`)."""
        return self._event.statistics()
