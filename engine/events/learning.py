"""What the last batches taught: samples by fate, prompts over the budget, empty batches. A fold over the event log.

Invariant: a batch counts once, when all its samples have a fate and it was trained, given up or without a survivor.
Groups that ended before a batch judged them count with the batch that ends next.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engine import metrics
from asyncrl.engine.events.types import (
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    Judged,
    Planned,
    Put,
    RunStarted,
    Settled,
    StepEnded,
)
from asyncrl.engine.records.fate import MASKED, OVER_BUDGET, RUN_ENDED, TRAINED, dropped, masked, split_fate
from asyncrl.engine.records.group import DISTINCT_RESPONSES, PROMPT, REWARD

WINDOW_BATCHES = 20
MASKED_OVER_BUDGET = masked(OVER_BUDGET)
_RUN_ENDED = dropped(RUN_ENDED)


@dataclass(slots=True)
class BatchTally:
    """Of one batch, or several added up: samples by fate, groups, steps, and samples over the budget by prompt.

    `identical` counts groups whose responses are all the same. Groups with the best reward of the run are not
    counted, because their prompt is solved. `flat_steps` counts steps with a gradient of 0.
    """

    fates: Counter[str] = field(default_factory=Counter)
    over_budget: Counter[Any] = field(default_factory=Counter)
    batches: int = 1
    empty: int = 0
    groups: int = 0
    identical: int = 0
    steps: int = 0
    flat_steps: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0

    @property
    def samples(self) -> int:
        return self.fates.total()

    def of_kind(self, kind: str) -> int:
        """Return the number of samples of a kind (trained, masked, dropped or failed), for any reason."""
        return sum(n for fate, n in self.fates.items() if split_fate(fate)[0] == kind)

    @property
    def kept(self) -> int:
        """Samples of the groups that the filters kept: trained or masked."""
        return self.fates[TRAINED] + self.of_kind(MASKED)

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of all samples judged; None without any."""
        return self.reward_sum / self.reward_count if self.reward_count else None

    @classmethod
    def total(cls, parts: Iterable["BatchTally"]) -> "BatchTally":
        """Return the sum of the parts."""
        whole = cls(batches=0)
        # This runs once per batch over the whole window, and plain sums are ten times as fast as Counter.update.
        for part in parts:
            for fate, n in part.fates.items():
                whole.fates[fate] += n
            for prompt, n in part.over_budget.items():
                whole.over_budget[prompt] += n
            whole.batches += part.batches
            whole.empty += part.empty
            whole.groups += part.groups
            whole.identical += part.identical
            whole.steps += part.steps
            whole.flat_steps += part.flat_steps
            whole.reward_sum += part.reward_sum
            whole.reward_count += part.reward_count
        return whole


@dataclass(frozen=True, slots=True)
class Agreement:
    """How trainer and generators agree in a step whose tokens all have age 0: mean ratio, share out of clip range."""

    step: int
    tokens: int
    ratio: float
    outside: float


@dataclass(slots=True)
class _Open:
    figures: BatchTally = field(default_factory=BatchTally)
    unsettled: int = 0
    ended: bool = False


class Learning:
    """Folds a run. `recent` sums the last batches that ended, `in_vain` those since the last trained batch."""

    kinds = (RunStarted, Put, Judged, BatchJudged, BatchGivenUp, Planned, StepEnded, Settled)

    def __init__(self) -> None:
        self.batches = 0
        self.in_vain = BatchTally(batches=0)
        self.agreement: Agreement | None = None
        self.recent = BatchTally(batches=0)
        self._window: deque[BatchTally] = deque(maxlen=WINDOW_BATCHES)
        self._open: dict[int, _Open] = {}
        self._batch_of: dict[int, int] = {}
        self._worst, self._best = math.inf, -math.inf
        # By unsettled group: its prompt, and whether its responses are all the same.
        self._groups: dict[int, tuple[Any, bool]] = {}
        self._before = BatchTally(batches=0)
        self._training = -1

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Settled():
                self._settle(event)
            case Judged():
                again = self._open.get(self._batch_of.get(event.group, -1))
                if again is not None:
                    again.unsettled -= 1
                self._batch_of[event.group] = event.batch
                if event.batch not in self._open:
                    self._open[event.batch] = _Open()
                self._open[event.batch].unsettled += 1
            case Put():
                low, high = _extremes(event.tags.get(REWARD, ()))
                self._worst, self._best = min(self._worst, low), max(self._best, high)
                solved = high >= self._best > self._worst
                alike = event.tags.get(DISTINCT_RESPONSES) == 1 and len(event.keys) > 1 and not solved
                self._groups[event.group] = (event.tags.get(PROMPT), alike)
            case BatchJudged():
                batch = self._open.setdefault(event.batch, _Open())
                batch.figures.reward_sum += event.reward_sum
                batch.figures.reward_count += event.reward_count
                self._end(event.batch, ended=not event.kept)
            case Planned():
                self._training = event.batch
            case StepEnded() if self._training in self._open:
                self._step(event)
                self._end(self._training, ended=True)
            case BatchGivenUp():
                self._end(event.batch, ended=True)
            case RunStarted():
                window = event.config.get("run", {}).get("alarm_window", WINDOW_BATCHES)
                self._window = deque(self._window, maxlen=window)

    def _settle(self, event: Settled) -> None:
        prompt, alike = self._groups.pop(event.group, (None, False))
        number = self._batch_of.pop(event.group, None)
        batch = self._open.get(-1 if number is None else number)
        figures = self._before if batch is None else batch.figures
        figures.fates.update(event.fates)
        figures.fates.pop(_RUN_ENDED, None)
        figures.groups += 1
        figures.identical += alike
        if MASKED_OVER_BUDGET in event.fates:
            figures.over_budget[prompt] += event.fates.count(MASKED_OVER_BUDGET)
        if batch is not None and number is not None:
            batch.unsettled -= 1
            self._end(number, ended=False)

    def _step(self, event: StepEnded) -> None:
        figures = self._open[self._training].figures
        figures.steps += 1
        figures.flat_steps += event.metrics.get(metrics.GRAD_NORM) == 0.0
        self.agreement = agreement(event.step, event.tokens, event.ages, event.metrics) or self.agreement

    def _end(self, number: int, *, ended: bool) -> None:
        """Count a batch once it has ended and all its samples have a fate."""
        batch = self._open.get(number)
        if batch is None:
            return
        batch.ended |= ended
        if not batch.ended or batch.unsettled:
            return
        del self._open[number]
        figures = batch.figures
        figures.empty = not figures.fates[TRAINED]
        figures = BatchTally.total((figures, self._before))
        self._before = BatchTally(batches=0)
        self._window.append(figures)
        self.recent = BatchTally.total(self._window)
        self.batches += 1
        self.in_vain = BatchTally.total((self.in_vain, figures)) if figures.empty else BatchTally(batches=0)


def _extremes(rewards: Sequence[Any]) -> tuple[float, float]:
    """Return the smallest and the largest finite reward, as a log has them; (inf, -inf) without any."""
    try:
        return min(rewards), max(rewards)
    except (TypeError, ValueError):  # None, NaN or infinities (which a log writes as maps), or no rewards.
        numbers = [reward for reward in rewards if isinstance(reward, int | float)]
        return min(numbers, default=math.inf), max(numbers, default=-math.inf)


def agreement(step: int, tokens: int, ages: Mapping[Any, int], figures: Mapping[str, float]) -> Agreement | None:
    """Return how trainer and generators agree in a step of so many tokens; None if a token is older than the weights.

    With decoupled PPO the ratio is to the trainer's own policy, so the importance weights are used instead.
    """
    if set(map(int, ages)) != {0}:
        return None
    weight = figures.get(metrics.WEIGHT_MEAN, 0.0)
    if weight:
        return Agreement(step, tokens, weight, figures.get(metrics.TRUNCATED_FRACTION, 0.0))
    return Agreement(step, tokens, figures.get(metrics.RATIO_MEAN, 1.0), figures.get(metrics.CLIPPED_FRACTION, 0.0))
