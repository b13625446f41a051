"""Run-ahead: groups dispatched whose capacity has not come back. The one limit on the producer."""

from collections.abc import Iterable

from asyncrl.engine.aio.signal import Signal


class RunAhead:
    """A counted budget of `limit` groups. A group's capacity comes back once; a second return is ignored.

    Example, at 2 groups per step and `max_staleness` 1: the limit is (1 + 1) · 2 = 4. Groups 0 to 3 are dispatched, and
    0 and 1 are trained. Until their version is published all 4 are out, so nothing is dispatched that would be too
    old when its turn comes. Then 0 and 1 give their capacity back, and groups 4 and 5 may go.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"run-ahead limit is {limit}; it must be at least 1")
        self.limit = limit
        self._out: set[int] = set()
        self.changed = Signal()

    @property
    def used(self) -> int:
        return len(self._out)

    @property
    def out(self) -> list[int]:
        """The groups whose capacity has not come back, in order."""
        return sorted(self._out)

    @property
    def free(self) -> int:
        return self.limit - len(self._out)

    def take(self, group: int) -> None:
        """Use capacity for a group about to be dispatched."""
        if not self.free:
            raise RuntimeError(f"run-ahead is used up: {self.limit} groups are out")
        self._out.add(group)

    def restore(self, groups: Iterable[int]) -> None:
        """Take up the groups whose capacity is out; they may be more than a smaller limit allows."""
        self._out.update(groups)

    def give_back(self, groups: Iterable[int]) -> list[int]:
        """Give back the capacity of groups; return those that held any."""
        freed = [group for group in groups if group in self._out]
        self._out.difference_update(freed)
        if freed:
            self.changed.notify()
        return freed
