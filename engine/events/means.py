"""Means over batches: of the first ones, and of the last."""

from collections import deque
from collections.abc import Sequence

WINDOW = 10


class Means:
    """The first `WINDOW` and the last `keep` (sum, count) pairs, and their means: None, never NaN, if empty."""

    def __init__(self, keep: int = WINDOW) -> None:
        self.first: list[tuple[float, int]] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=max(keep, WINDOW))

    @property
    def last(self) -> list[tuple[float, int]]:
        """The last `WINDOW` pairs."""
        return self.recent(WINDOW)

    def add(self, total: float, count: int) -> None:
        if len(self.first) < WINDOW:
            self.first.append((total, count))
        self._recent.append((total, count))

    def recent(self, pairs: int) -> list[tuple[float, int]]:
        """Return the last `pairs` pairs; ValueError if fewer than that are kept."""
        if pairs > (self._recent.maxlen or 0):
            raise ValueError(f"cannot return {pairs} batches: only the last {self._recent.maxlen} are kept")
        return list(self._recent)[-pairs:]

    @staticmethod
    def mean(pairs: Sequence[tuple[float, int]]) -> float | None:
        count = sum(n for _, n in pairs)
        return sum(total for total, _ in pairs) / count if count else None
