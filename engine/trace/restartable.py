"""Work that can begin anew, as a driver that was started again begins anew."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup


class Restartable:
    """One task of a group; `restart` cancels it and begins it again."""

    def __init__(self, tasks: TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks = tasks
        self._work = work
        self._scope = anyio.CancelScope()

    def start(self) -> None:
        self._tasks.start_soon(self._run, self._scope)

    def restart(self) -> None:
        self._scope.cancel()
        self._scope = anyio.CancelScope()
        self.start()

    async def _run(self, scope: anyio.CancelScope) -> None:
        with scope:
            await self._work()
