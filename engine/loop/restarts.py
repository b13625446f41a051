"""A policy of restarts: how many, within which time, after which pause.

Invariant: within any window there are at most `most` restarts, so nothing that dies again and again is restarted for
ever.
"""

from collections import deque
from collections.abc import Callable

LONGEST_PAUSE_S = 60.0


class Restarts:
    """The restarts of one part. `now` is in seconds.

    Example, with 3 restarts within 3600 s and a first pause of 1 s: a part that dies at 0, 10 and 20 s is restarted
    after 1, 2 and 4 s. If it dies again at 30 s, the budget is used up; if at 3700 s, it is restarted after 1 s.
    """

    def __init__(self, most: int, *, window_s: float, pause_s: float, now: Callable[[], float]) -> None:
        self._most = most
        self._window_s = window_s
        self._pause_s = pause_s
        self._now = now
        self._times: deque[float] = deque()

    @property
    def count(self) -> int:
        """How many restarts the window has."""
        while self._times and self._times[0] <= self._now() - self._window_s:
            self._times.popleft()
        return len(self._times)

    @property
    def used_up(self) -> bool:
        return self.count >= self._most

    def take(self) -> float:
        """Count a restart; return how long to wait before it, in seconds."""
        pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2.0**self.count)
        self._times.append(self._now())
        return pause_s
