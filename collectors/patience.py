"""How long groups may take: limits that stand still while the generator sleeps.

Invariant: a group has its whole time awake, however often its generator leaves the device in between.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Patience:
    """Limits of tasks of one event loop, each a cancel scope."""

    def __init__(self) -> None:
        self._left: dict[anyio.CancelScope, float] = {}
        self._stopped = False

    @contextmanager
    def limit(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Cancel what is inside after `seconds` awake; `renew` gives the scope another time."""
        with anyio.CancelScope() as scope:
            self.renew(scope, seconds)
            try:
                yield scope
            finally:
                del self._left[scope]

    def renew(self, scope: anyio.CancelScope, seconds: float) -> None:
        """Give a scope so many seconds from now on."""
        self._left[scope] = seconds
        scope.deadline = math.inf if self._stopped else anyio.current_time() + seconds

    def stop(self) -> None:
        """Have no time pass."""
        if not self._stopped:
            self._stopped = True
            for scope in self._left:
                self._left[scope] = scope.deadline - anyio.current_time()
                scope.deadline = math.inf

    def go_on(self) -> None:
        """Have time pass again."""
        if self._stopped:
            self._stopped = False
            for scope, seconds in self._left.items():
                scope.deadline = anyio.current_time() + seconds
