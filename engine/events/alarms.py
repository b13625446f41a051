"""Warns, during a run, that little or nothing is learned, and says why and which option would help.

A fold over the event log. An alarm is raised when a share over the last batches reaches its limit. It is over when the
share is clearly below the limit. It warns once each time it is raised; without `warn`, as when a log is read, it is
silent.

Example: of 960 samples in 20 batches 912 were dropped. That is 0.95, the limit of `untrained`, so the alarm is raised.
It is over when a later window loses less than 0.8 · 0.95 = 0.76.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.engine import metrics
from asyncrl.engine.events.learning import MASKED_OVER_BUDGET, Agreement, BatchTally, Learning
from asyncrl.engine.events.remedies import remedy, with_options
from asyncrl.engine.events.types import AnyEvent, RunEnded, RunStarted
from asyncrl.engine.records.fate import FAILED_FATE, MASKED, TRAINED, split_fate

MIN_BATCHES = 10
"""Batches that an alarm needs before it can be raised, and empty batches in a row that raise `empty_batches`. A
shorter run still raises `over_budget`, `masked`, `failed` and `ratio_at_age_0` when it ends."""
OVER_AT = 0.8
"""Share of its limit below which an alarm is over. With 1, a share near the limit would warn again and again."""
LIMITS = {
    "over_budget": 0.1,
    "masked": 0.5,
    "failed": 0.5,
    "untrained": 0.95,
    "identical": 0.5,
    "flat_gradient": 0.5,
}
"""Share that raises an alarm: of all samples, of samples that the filters kept (`over_budget`, `masked`), of groups
(`identical`), or of steps (`flat_gradient`)."""
RATIO_TOLERANCE = {"float32": 0.01, "bfloat16": 0.05}
"""Largest distance of the mean ratio from 1 at age 0, by model.dtype. Below it is rounding; above it the trainer
computes another distribution than the one that the generator sampled from."""
RATIO_TOKENS = {"bfloat16": 256}
"""Fewer tokens in a step say nothing, by model.dtype. Logits of 16 and more are 0.125 apart in bfloat16, and the few
prompts of such a step share what is rounded: of 48 tokens of one group 28 % were out of the clip range."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured over the last batches. `share` is compared with `limit`; `say` returns the message."""

    name: str
    share: float
    limit: float
    say: Callable[[], str]


@dataclass(slots=True)
class Alarm:
    """One alarm of a run: the first and the last batch, in order of their ends, after which it was raised."""

    name: str
    first_batch: int
    last_batch: int
    share: float
    message: str
    raised: bool = True


class Alarms:
    """Folds a run. `warn(message, **figures)` is called when an alarm is raised."""

    kinds = (*Learning.kinds, RunEnded)

    def __init__(self, warn: Callable[..., Any] = lambda message, **figures: None) -> None:
        self.learning = Learning()
        self.seen: dict[str, Alarm] = {}
        self._warn = warn
        self._config: Mapping[str, Any] = {}
        self._judged = 0

    def apply(self, event: AnyEvent) -> None:
        if isinstance(event, RunEnded):
            self._judge()
            return
        if isinstance(event, RunStarted):
            self._config = event.config
        self.learning.apply(event)
        if self.learning.batches > self._judged:
            self._judged = self.learning.batches
            if self._judged >= MIN_BATCHES:
                self._judge()

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that are raised now."""
        return [alarm for alarm in self.seen.values() if alarm.raised]

    def summary(self) -> list[dict[str, Any]]:
        """Return all alarms of the run, in order of their first batch, each with its largest share."""
        return [
            {
                "name": alarm.name,
                "first_batch": alarm.first_batch,
                "last_batch": alarm.last_batch,
                "share": round(alarm.share, 4),
                "message": alarm.message,
                "raised": alarm.raised,
            }
            for alarm in self.seen.values()
        ]

    def metrics(self) -> dict[str, float]:
        """Return the shares over the last batches that ended, by metric name."""
        recent = self.learning.recent
        return {
            metrics.UNTRAINED_FRACTION: 1 - recent.fates[TRAINED] / recent.samples if recent.samples else 0.0,
            metrics.OVER_BUDGET_FRACTION: recent.fates[MASKED_OVER_BUDGET] / (recent.kept or 1),
            metrics.OVER_BUDGET_PROMPTS: len(recent.over_budget),
            metrics.IDENTICAL_FRACTION: recent.identical / (recent.groups or 1),
            metrics.EMPTY_BATCH_FRACTION: recent.empty / (recent.batches or 1),
            metrics.ALARMS_RAISED: len(self.raised),
        }

    def in_vain(self) -> str:
        """Return where the samples since the last trained batch went, and what would help; empty without any."""
        return self._causes(self.learning.in_vain) if self.learning.in_vain.batches else ""

    def _judge(self) -> None:
        for finding in self._findings(self.learning.recent):
            alarm = self.seen.get(finding.name)
            on = alarm is not None and alarm.raised
            if finding.share < finding.limit * (OVER_AT if on else 1.0):
                if alarm is not None:
                    alarm.raised = False
                continue
            message = finding.say()
            if alarm is None:
                alarm = self.seen[finding.name] = Alarm(finding.name, self._judged, 0, 0.0, message)
            alarm.last_batch, alarm.raised = self._judged, True
            if finding.share >= alarm.share:
                alarm.share, alarm.message = finding.share, message
            if not on:
                self._warn(message, alarm=finding.name, batch=self._judged, share=round(finding.share, 4))

    def _findings(self, recent: BatchTally) -> Iterator[Finding]:
        if recent.samples:
            yield from self._of_samples(recent)
        if recent.batches >= MIN_BATCHES:
            alike, flat = recent.identical / (recent.groups or 1), recent.flat_steps / (recent.steps or 1)
            yield Finding("identical", alike, LIMITS["identical"], partial(self._identical, recent))
            yield Finding("flat_gradient", flat, LIMITS["flat_gradient"], partial(self._flat, recent))
        in_a_row = self.learning.in_vain.batches
        yield Finding("empty_batches", in_a_row, MIN_BATCHES, partial(self._empty, in_a_row))
        if self.learning.agreement is not None:
            yield self._ratio(self.learning.agreement)

    def _of_samples(self, recent: BatchTally) -> Iterator[Finding]:
        """Yield the findings on samples. `untrained` is left out if one cause alone explains it."""
        over, failed, kept = recent.fates[MASKED_OVER_BUDGET], recent.of_kind(FAILED_FATE), recent.kept or 1
        shares = {
            "over_budget": over / kept,
            "masked": (recent.of_kind(MASKED) - over) / kept,
            "failed": failed / recent.samples,
        }
        for name, share in shares.items():
            say = self._over_budget if name == "over_budget" else self._lost
            yield Finding(name, share, LIMITS[name], partial(say, recent))
        said = any(share >= LIMITS[name] for name, share in shares.items())
        lost = 0.0 if said or recent.batches < MIN_BATCHES else 1 - recent.fates[TRAINED] / recent.samples
        yield Finding("untrained", lost, LIMITS["untrained"], partial(self._lost, recent))

    def _lost(self, recent: BatchTally) -> str:
        return f"of the {self._causes(recent)}"

    def _over_budget(self, recent: BatchTally) -> str:
        prompts = recent.over_budget
        return (
            f"{recent.fates[MASKED_OVER_BUDGET]} of {recent.kept} samples that the filters kept in the last "
            f"{recent.batches} batches, of {len(prompts)} prompts such as prompt {prompts.most_common(1)[0][0]}, "
            f"are longer than a micro-batch and not trained: {remedy(MASKED_OVER_BUDGET, self._config)}"
        )

    def _causes(self, figures: BatchTally) -> str:
        """Return how many samples were trained and lost, by cause, and what helps against the largest cause."""
        lost = Counter({fate: n for fate, n in figures.fates.items() if fate != TRAINED})
        if not lost:
            return f"{figures.samples} samples of {figures.batches} batches none was lost"
        causes = ", ".join(f"{n} {fate.replace(':', ' ')}" for fate, n in lost.most_common(4))
        # If everything that the filters kept is masked, the mask is the obstacle, however much they dropped.
        in_the_way = [fate for fate, _ in lost.most_common() if split_fate(fate)[0] == MASKED or figures.fates[TRAINED]]
        reward = "" if figures.mean_reward is None else f"; mean reward {figures.mean_reward:.3g}"
        return (
            f"{figures.samples} samples of {figures.batches} batches {figures.fates[TRAINED] or 'none'} were trained: "
            f"{causes}{reward}. {_sentence(remedy([*in_the_way, *lost][0], self._config))}"
        )

    def _identical(self, recent: BatchTally) -> str:
        return (
            f"in {recent.identical} of {recent.groups} groups of the last {recent.batches} batches all responses "
            "are the same, and not the best: the policy has collapsed. "
            + with_options("Raise {rollout.temperature}", self._config)
        )

    def _flat(self, recent: BatchTally) -> str:
        return (
            f"the gradient was 0 in {recent.flat_steps} of the last {recent.steps} steps: rewards within a group "
            "do not differ, so nothing is learned. The filter zero_std drops such groups before they cost a step"
        )

    def _empty(self, in_a_row: int) -> str:
        return f"{in_a_row} batches in a row had nothing to train. Of the {self.in_vain()}"

    def _ratio(self, agreement: Agreement) -> Finding:
        """Compare the ratio of a step at age 0 with 1; the share out of the clip range counts if the range is wide."""
        trainer, dtype = self._config.get("trainer", {}), self._config.get("model", {}).get("dtype")
        tolerance = RATIO_TOLERANCE.get(dtype, min(RATIO_TOLERANCE.values()))
        off = abs(agreement.ratio - 1)
        if agreement.tokens < RATIO_TOKENS.get(dtype, 0):
            off = 0.0
        elif min(trainer.get("clip_low", 1.0), trainer.get("clip_high", 1.0)) >= 4 * tolerance:
            off = max(off, agreement.outside)

        def say() -> str:
            helps = "Set {trainer.packed} to false" if trainer.get("packed") else "Check {model.path} and {model.dtype}"
            return (
                f"at age 0 trainer and generators should agree, but in step {agreement.step} the mean ratio is "
                f"{agreement.ratio:.4f} and {agreement.outside:.1%} of the tokens are out of range: they compute "
                f"different distributions. {with_options(helps, self._config)}"
            )

        return Finding("ratio_at_age_0", off, tolerance, say)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
