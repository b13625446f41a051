"""How a run, simulated or recorded, spends its time, and what comes of it: one fold over its events.

Time counts from the first dispatch to the end of the last step, in seconds of the run's own clock.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from asyncrl.engine.events.length_bias import LengthBias
from asyncrl.engine.events.types import (
    AnyEvent,
    Claimed,
    ClaimReturned,
    Dispatched,
    OwnerDead,
    Published,
    Put,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.records.fate import RUN_ENDED, TRAINED, split_fate


@dataclass(slots=True)
class _Level:
    """A count over time: its mean, its largest value, and the seconds at 0."""

    now: int = 0
    largest: int = 0
    area: float = 0.0
    idle_s: float = 0.0
    since: float = 0.0

    def move(self, by: int, t: float) -> None:
        self.until(t)
        self.now += by
        self.largest = max(self.largest, self.now)

    def until(self, t: float) -> None:
        self.area += self.now * (t - self.since)
        self.idle_s += (t - self.since) * (self.now == 0)
        self.since = t

    def idle_by(self, t: float) -> float:
        """Return the seconds at 0 up to `t`."""
        return self.idle_s + max(0.0, t - self.since) * (self.now == 0)


class Timeline:
    """Levels over time, sums and counts; `summary` may be asked at any time."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()
        self.fates: Counter[str] = Counter()
        self.lengths = LengthBias()
        self._steps: list[float] = []
        self._ends: list[float] = []
        self._publishes: list[float] = []
        self._tokens = 0
        self._groups_trained = 0
        self._first: float | None = None
        self._last = 0.0
        self._in_flight: dict[int, str] = {}
        self._generators: defaultdict[str, _Level] = defaultdict(_Level)
        self._buffer, self._trainer = _Level(), _Level()

    def apply(self, event: AnyEvent) -> None:
        self.lengths.apply(event)
        match event:
            case Dispatched():
                self._begin(event.t)
                self._in_flight[event.group] = event.collector
                if event.collector not in self._generators:
                    self._generators[event.collector].since = self._first or 0.0
                self._generators[event.collector].move(1, event.t)
            case Put():
                self._generators[self._in_flight.pop(event.group)].move(-1, event.t)
                self._buffer.move(1, event.t)
            case Claimed():
                self._buffer.move(-len(event.groups), event.t)
            case ClaimReturned() | OwnerDead():
                self._buffer.move(len(event.groups), event.t)
            case Settled():
                self._settled(event)
            case StepStarted():
                self._trainer.move(1, event.t)
            case StepEnded():
                self._step(event)
            case Published() if event.version:
                self._publishes.append(event.seconds)

    def _begin(self, t: float) -> None:
        if self._first is None:
            self._first = t
            self._buffer.since = self._trainer.since = t

    def _settled(self, event: Settled) -> None:
        if event.group in self._in_flight:
            self._generators[self._in_flight.pop(event.group)].move(-1, event.t)
        self.fates.update(event.fates)
        self._groups_trained += TRAINED in event.fates

    def _step(self, event: StepEnded) -> None:
        self._trainer.move(-1, event.t)
        self._steps.append(event.seconds)
        self._ends.append(event.t)
        self._tokens += event.tokens
        self.ages.update({int(age): n for age, n in event.ages.items()})
        self._last = event.t

    def _cycle(self) -> float | None:
        """Return the mean time from a step's end to the next one's, in the last half of the run; None for one step.

        A run's start, in which models compile, does not count.
        """
        cycles = [after - before for before, after in pairwise(self._ends)]
        return mean(cycles[len(cycles) // 2 :]) if cycles else None

    def summary(self) -> dict[str, Any]:
        """Return the figures by name; None for those that need a step, if there was none."""
        seconds = self._last - (self._first or 0.0)
        steps = len(self._steps)
        ended = {fate: n for fate, n in self.fates.items() if split_fate(fate)[1] != RUN_ENDED}
        samples = sum(ended.values())
        idle = [min(1.0, level.idle_by(self._last) / seconds) for level in self._generators.values()] if seconds else []
        return {
            "steps": steps,
            "seconds": _rounded(seconds),
            "seconds_per_step": _rounded(seconds / steps) if steps else None,
            "cycle_seconds": _rounded(self._cycle() or seconds) if steps else None,
            "step_seconds": _mean(self._steps),
            "step_seconds_median": _rounded(median(self._steps)) if steps else None,
            "publish_seconds": _mean(self._publishes),
            "mean_age": _rounded(_mean_of(self.ages)) if steps else None,
            "ages": {str(age): n for age, n in sorted(self.ages.items())},
            "trained_share": _rounded(self.fates[TRAINED] / samples) if samples else None,
            "groups_per_second": _rounded(self._groups_trained / seconds) if seconds else None,
            "tokens_per_second": _rounded(self._tokens / seconds) if seconds else None,
            "trainer_idle": _rounded(1 - sum(self._steps) / seconds) if seconds else None,
            "generators_idle": _rounded(sum(idle) / len(idle)) if idle else None,
            "buffer_mean": _rounded(self._buffer.area / seconds) if seconds else None,
            "buffer_max": self._buffer.largest,
            "length_ratio": _rounded(self.lengths.ratio),
            "lost": _share(ended, samples),
            "wasted_tokens": dict(sorted(self.lengths.wasted_tokens.items())),
        }


def _share(ended: Mapping[str, int], samples: int) -> dict[str, float]:
    """Return the share of samples with each fate other than trained."""
    return {fate: round(n / samples, 4) for fate, n in sorted(ended.items()) if fate != TRAINED}


def _mean(values: list[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _mean_of(counts: Counter[int]) -> float:
    return sum(value * n for value, n in counts.items()) / counts.total()


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
