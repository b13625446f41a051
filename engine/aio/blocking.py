"""Where blocking calls run: in a thread, so that an event loop stays responsive, or in place.

In place serves `runtime: local` and virtual time, where one order for one seed matters more.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint

Result = TypeVar("Result")
Blocking = Callable[[Callable[[], Result]], Awaitable[Result]]


async def in_thread(call: Callable[[], Result]) -> Result:
    """Run `call` in a worker thread; cancellation leaves the thread behind to finish."""
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


async def in_place(call: Callable[[], Result]) -> Result:
    """Run `call` now, after letting other tasks run once."""
    await checkpoint()
    return call()
