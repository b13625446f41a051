"""Recall: the first groups of a collector that brings none are issued again elsewhere.

Invariant: only groups of a collector that has never brought one are recalled, once the balance says that it is late.
If it brings one of them after all, that group counts as usual.
"""

import math
from collections.abc import Callable
from functools import partial

import structlog

from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.collectors import Collectors
from asyncrl.engine.loop.groups import Groups

log = structlog.get_logger()


class Recall:
    """Cancels the groups that the balance says are late. `now` is the log's time."""

    def __init__(
        self,
        collectors: Collectors,
        *,
        groups: Groups,
        balance: Balance,
        now: Callable[[], float],
    ) -> None:
        self._collectors = collectors
        self._groups = groups
        self._balance = balance
        self._now = now
        self._asked: set[int] = set()

    async def run(self) -> None:
        """Wait until a collector is late, and ask it for its groups."""
        while True:
            due, name, groups = self._next()
            # Possibly forever: no collector need ever be late, and the front end tells if groups are lacking.
            if await self._groups.changed.wait_at_most(partial(self._due_is_not, due), due - self._now()):
                continue
            log.warning(
                "a collector brought nothing in twice the time of the others; its groups are issued again elsewhere",
                collector=name,
                groups=groups,
            )
            self._asked.update(groups)
            self._groups.recall(groups)
            await self._collectors.cancel(name, groups)

    def _due_is_not(self, due: float) -> bool:
        return self._next()[0] != due

    def _next(self) -> tuple[float, str, list[int]]:
        """Return when the next collector is late, its name and its groups; infinity and no name if none can be."""
        late = ((at, name, groups) for name, (at, groups) in self._balance.late().items())
        return min((one for one in late if not self._asked.issuperset(one[2])), default=(math.inf, "", []))
