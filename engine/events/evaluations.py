"""What the evaluations of a run came to. A fold over the event log, for the view, the metrics and the summary."""

from dataclasses import asdict
from typing import Any

from asyncrl.engine import metrics
from asyncrl.engine.events.types import AnyEvent, EvaluationEnded, EvaluationFailed, EvaluationStarted


class Evaluations:
    """The first, last and best evaluation; which version is evaluated now; how many failed or were left out."""

    kinds = (EvaluationStarted, EvaluationEnded, EvaluationFailed)

    def __init__(self) -> None:
        self.first: EvaluationEnded | None = None
        self.last: EvaluationEnded | None = None
        self.best: EvaluationEnded | None = None
        self.under_way: int | None = None
        self.ended = 0
        self.failed = 0
        self.skipped = 0

    def apply(self, event: AnyEvent) -> None:
        match event:
            case EvaluationStarted():
                self.under_way = event.version
            case EvaluationEnded():
                self.under_way = None
                self.ended += 1
                self.first = self.first or event
                self.last = event
                if self.best is None or _figure(event) > _figure(self.best):
                    self.best = event
            case EvaluationFailed(skipped=True):
                self.skipped += 1
            case EvaluationFailed():
                self.under_way = None
                self.failed += 1

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last evaluation that ended, 0 before there is one, and how many failed."""
        last = self.last
        return {
            metrics.EVALUATION_VERSION: 0 if last is None else last.version,
            metrics.EVALUATION_PASS_AT_1: 0.0 if last is None else last.scores.pass_at_1 or 0.0,
            metrics.EVALUATION_REWARD: 0.0 if last is None or last.scores.reward is None else last.scores.reward.value,
            metrics.EVALUATIONS: self.ended,
            metrics.EVALUATIONS_FAILED: self.failed + self.skipped,
        }

    def summary(self) -> dict[str, Any] | None:
        """Return what `summary.json` has of evaluations; None if the run had none."""
        if not (self.ended or self.failed or self.skipped):
            return None
        return {
            "ended": self.ended,
            "failed": self.failed,
            "skipped": self.skipped,
            **{
                name: _plain(event) for name, event in (("first", self.first), ("last", self.last), ("best", self.best))
            },
        }


def _figure(event: EvaluationEnded) -> tuple[float, float]:
    """Return what evaluations are compared by: pass@1, and of equals the mean reward."""
    scores = event.scores
    return scores.pass_at_1 or 0.0, 0.0 if scores.reward is None else scores.reward.value


def _plain(event: EvaluationEnded | None) -> dict[str, Any] | None:
    if event is None:
        return None
    datasets = {name: asdict(scores) for name, scores in event.datasets.items()}
    return {"version": event.version, "seconds": event.seconds, "scores": asdict(event.scores), "datasets": datasets}
