"""What the collectors' engines did between the last two steps, from the totals in their put notices.

Invariant: a collector's spans follow one another without a gap, from its first grant to its last put notice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncrl.engine import metrics
from asyncrl.engine.records.engine_use import EngineUse


@dataclass(slots=True)
class _Span:
    """A collector's engine from one report to another one, and the newest report."""

    begin: EngineUse = field(default_factory=EngineUse)
    end: EngineUse = field(default_factory=EngineUse)
    newest: EngineUse = field(default_factory=EngineUse)

    def go_on(self) -> None:
        """Span the time up to the newest report, if there was one since the last call."""
        if self.newest is not self.end:
            self.begin, self.end = self.end, self.newest

    def per_second(self, total: Callable[[EngineUse], float]) -> float:
        seconds = self.end.up_s - self.begin.up_s
        return (total(self.end) - total(self.begin)) / seconds if seconds else 0.0


class EngineUses:
    """One span per collector that has reported.

    Example: an engine has been busy for 8 of 10 s when it brings a group, and a step ends at 12 s: its share is 0.8,
    also at the end of further steps until it brings the next group. That is at 20 s, and it was busy for 17 s by then:
    now its share is (17 - 8) / (20 - 10) = 0.9.
    """

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}

    def report(self, collector: str, use: EngineUse) -> None:
        self._spans.setdefault(collector, _Span()).newest = use

    def forget(self, collector: str) -> None:
        """Let go of a collector that died: its successor counts from 0."""
        self._spans.pop(collector, None)

    def take(self) -> Mapping[str, float]:
        """Return the metrics of a step that ends now."""
        spans = list(self._spans.values())
        for span in spans:
            span.go_on()
        count = len(spans) or 1
        return {
            metrics.ENGINE_BUSY: sum(span.per_second(lambda use: use.busy_s) for span in spans) / count,
            metrics.ENGINE_PAUSED: sum(span.per_second(lambda use: use.paused_s) for span in spans) / count,
            metrics.ENGINE_CACHE: sum(span.end.cache_used for span in spans) / count,
            metrics.ENGINE_RUNNING: sum(span.end.running for span in spans),
            metrics.ENGINE_WAITING: sum(span.end.waiting for span in spans),
            metrics.ENGINE_TOKEN_RATE: sum(span.per_second(lambda use: use.tokens) for span in spans),
        }
