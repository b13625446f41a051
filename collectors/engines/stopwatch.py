"""How long an engine was busy, and how long paused, since it started."""

import anyio


class Stopwatch:
    """Tell it what changes; time with requests in flight counts as busy, unless it is paused."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._busy = False
        self._paused = False
        self._busy_s = 0.0
        self._paused_s = 0.0

    def turn(self, *, busy: bool | None = None, paused: bool | None = None) -> None:
        """Say what holds from now on; None for what stays."""
        now = anyio.current_time()
        if self._since is not None:
            self._paused_s += (now - self._since) * self._paused
            self._busy_s += (now - self._since) * (self._busy and not self._paused)
        self._since = now
        self._busy = self._busy if busy is None else busy
        self._paused = self._paused if paused is None else paused

    def read(self) -> tuple[float, float]:
        """Return the seconds busy and paused up to now."""
        self.turn()
        return self._busy_s, self._paused_s
