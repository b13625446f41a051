"""What each reward function gives, by the name of its part. A fold over the event log.

The samples of a batch are here those written since the batch before it was judged, of whatever fate.
"""

import math
from typing import Any

from asyncrl.configs.rewards import reward_entries
from asyncrl.engine import metrics
from asyncrl.engine.events.means import Means
from asyncrl.engine.events.types import AnyEvent, BatchJudged, Put, RunStarted
from asyncrl.engine.records import group as tag


class RewardParts:
    """Means by part; `stood_in` counts samples whose score failed and which have `reward.on_failure` instead."""

    kinds = (RunStarted, Put, BatchJudged)

    def __init__(self) -> None:
        self.stood_in = 0
        self._means: dict[str, Means] = {}
        self._open: dict[str, list[float]] = {}

    def apply(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                entries = reward_entries(event.config.get("reward", {}).get("functions", []))
                self._means = {entry.part: Means() for entry in entries}
                self._open = {entry.part: [] for entry in entries}
            case Put():
                causes, statuses = event.tags.get(tag.CAUSE, ()), event.tags.get(tag.STATUS, ())
                self.stood_in += sum(
                    cause is not None and status != tag.FAILED for cause, status in zip(causes, statuses, strict=False)
                )
                for part, values in self._open.items():
                    # What a log cannot write as a number is a map there.
                    numbers = [value for value in event.tags.get(part, ()) if isinstance(value, int | float)]
                    values.extend(filter(math.isfinite, numbers))
            case BatchJudged():
                for part, values in self._open.items():
                    self._means[part].add(sum(values), len(values))
                    values.clear()

    def recent(self) -> dict[str, float | None]:
        """Return each part's mean over the last ten batches; None while there is none."""
        return {part: Means.mean(means.last) for part, means in self._means.items()}

    def metrics(self) -> dict[str, float]:
        """Return each part's mean over the last batch, 0 if it had none, and how many samples were stood in for."""
        means = {
            f"{metrics.REWARD}/{part}_mean": Means.mean(means.recent(1)) or 0.0 for part, means in self._means.items()
        }
        return {**means, metrics.ON_FAILURE: self.stood_in}

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` says: by part, the means of the first and of the last ten batches."""
        return {
            part: {"first_10": Means.mean(means.first), "last_10": Means.mean(means.last)}
            for part, means in self._means.items()
        }
