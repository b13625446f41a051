"""Time that passes only while its owner is awake: for simulated and fake generators, which sleep as real ones do."""

import anyio

from asyncrl.engine.aio.signal import Signal


class Waking:
    """Awake at first."""

    def __init__(self) -> None:
        self._since: float | None = anyio.current_time()
        self._before = 0.0
        self._changed = Signal()

    @property
    def asleep(self) -> bool:
        return self._since is None

    @property
    def seconds(self) -> float:
        """How long the owner has been awake so far."""
        return self._before + (0.0 if self._since is None else anyio.current_time() - self._since)

    def sleep(self) -> None:
        self._before, self._since = self.seconds, None
        self._changed.notify()

    def wake(self) -> None:
        if self._since is None:
            self._since = anyio.current_time()
            self._changed.notify()

    async def last(self, seconds: float) -> None:
        """Return after `seconds` awake.

        Example: of 5 s, after a sleep from the second to the tenth second, 3 are left.
        """
        end = self.seconds + seconds
        while True:
            await self._changed.wait_until(lambda: not self.asleep)
            if not await self._changed.wait_at_most(lambda: self.asleep, end - self.seconds):
                return
