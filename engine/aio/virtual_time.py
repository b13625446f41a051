"""An event loop whose clock jumps to the next timer instead of sleeping.

One order for one seed, hours in milliseconds, and an exact stall detector: no timer and nothing
ready is an error. Nothing under it may use threads, sockets or the wall clock.
"""

# ruff: noqa: TID251 (this is the one place where asyncio itself is meant)

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

import anyio

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class Stalled(RuntimeError):
    """No timer is set and nothing is ready: every task waits for another."""


class _JumpSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("stalled: no timer and nothing ready")
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop on a jumping clock, starting at 0 s."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer; one at infinity (anyio's `sleep_forever`) is none, or no stall could be told."""
        if math.isinf(when):
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def virtual_clock() -> float:
    """Return virtual seconds of the running loop."""
    return asyncio.get_running_loop().time()


def run_virtual(main: Callable[..., Awaitable[Result]], *args: Any) -> Result:
    """Run `main` in virtual time."""
    return anyio.run(main, *args, backend_options={"loop_factory": VirtualLoop})
