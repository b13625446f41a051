"""Whether age lets long answers through as often as short ones, and which tokens were wasted, by cause.

Dropping groups by age discards long answers first, because they take longest to generate. This fold over the event log
keeps the lengths, in response tokens, of all generated samples, of those not lost to age (`fresh`), and of the trained
ones: over the run, over the last groups, by dataset and by prompt.

Example: samples of 10 and 30 tokens are generated, and age drops the second. The ratio is 10 / 20 = 0.5.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncrl.engine.events.prompt_waste import PromptWaste
from asyncrl.engine.events.types import AGE_REASONS, AnyEvent, Dispatched, Put, RunStarted, Settled, StepEnded
from asyncrl.engine.records.fate import CANCELLED, FAILED_FATE, RUN_ENDED, STALE, TRAINED, split_fate
from asyncrl.engine.records.group import DATASET, PROMPT, RESPONSE_TOKENS, TRAINABLE_TOKENS

WINDOW_GROUPS = 256
_QUARTERS = 4
# This fold is on the run's critical path, and a run has few different fates.
_split = lru_cache(1024)(split_fate)


class Lengths:
    """Number of samples by length in tokens."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    @property
    def samples(self) -> int:
        return self.counts.total()

    @property
    def tokens(self) -> int:
        return sum(length * n for length, n in self.counts.items())

    @property
    def mean(self) -> float | None:
        return self.tokens / self.samples if self.samples else None


@dataclass(slots=True)
class _Sums:
    """Samples and tokens that were generated, those of them not lost to age, and groups cancelled for age."""

    generated: int = 0
    generated_tokens: int = 0
    fresh: int = 0
    fresh_tokens: int = 0
    cancelled: int = 0

    def add(self, other: "_Sums", sign: int = 1) -> None:
        self.generated += sign * other.generated
        self.generated_tokens += sign * other.generated_tokens
        self.fresh += sign * other.fresh
        self.fresh_tokens += sign * other.fresh_tokens
        self.cancelled += sign * other.cancelled

    @property
    def ratio(self) -> float | None:
        if self.cancelled or not self.generated_tokens or not self.fresh:
            return None
        return (self.fresh_tokens / self.fresh) / (self.generated_tokens / self.generated)


class LengthBias:
    """Folds a run, which begins with its RunStarted: that names the filters' reasons about age.

    A sample that was still on its way when the run ended counts nowhere.
    """

    kinds = (RunStarted, Dispatched, Put, StepEnded, Settled)

    def __init__(self) -> None:
        self._lost_to_age = frozenset({STALE, CANCELLED, *AGE_REASONS})
        self.generated = Lengths()
        self.fresh = Lengths()
        self.trained = Lengths()
        self.by_dataset: defaultdict[str, tuple[Lengths, Lengths]] = defaultdict(lambda: (Lengths(), Lengths()))
        self.prompts = PromptWaste()
        self.wasted_tokens: Counter[str] = Counter()
        self.lost_tokens = 0
        self._whole = _Sums()
        self._recent = _Sums()
        self._window: deque[_Sums] = deque()
        # Trainable tokens of trained samples; tokens that steps have trained. The difference was withheld.
        self._trainable_tokens = 0
        self._stepped_tokens = 0
        # By unsettled group: prompt, dataset and lengths (None before the put); trainable tokens.
        self._waiting: dict[int, tuple[int | str, str, list[int] | None]] = {}
        self._trainable: dict[int, list[int]] = {}

    def apply(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self._lost_to_age = frozenset({STALE, CANCELLED, *event.age_reasons})
            case Dispatched():
                self._waiting[event.group] = (event.prompt, event.dataset, None)
            case Put():
                unknown = (event.tags.get(PROMPT, -1), str(event.tags.get(DATASET)), None)
                prompt, dataset, _ = self._waiting.get(event.group, unknown)
                lengths = list(event.tags.get(RESPONSE_TOKENS, ()))
                self._waiting[event.group] = (prompt, dataset, lengths)
                self._trainable[event.group] = list(event.tags.get(TRAINABLE_TOKENS, lengths))
            case StepEnded():
                self._stepped_tokens += event.tokens
            case Settled() if event.group in self._waiting:
                prompt, dataset, known = self._waiting.pop(event.group)
                trainable = self._trainable.pop(event.group, [])
                if TRAINED in event.fates:
                    self._trainable_tokens += sum(
                        n for fate, n in zip(event.fates, trainable, strict=False) if fate == TRAINED
                    )
                if known is not None:
                    self._end(prompt, dataset, Counter(zip(event.fates, known, strict=True)))
                elif any(split_fate(fate)[1] == CANCELLED for fate in event.fates):
                    self._count(prompt, dataset, _Sums(cancelled=1))

    def _end(self, prompt: int | str, dataset: str, samples: Counter[tuple[str, int]]) -> None:
        """Count a generated group; `samples` are counts by fate and length. Failed samples have no length."""
        sums = _Sums()
        trained_tokens = 0
        generated, trained = self.by_dataset[dataset]
        for (fate, length), n in samples.items():
            kind, reason = _split(fate)
            if reason == RUN_ENDED or kind == FAILED_FATE:
                continue
            sums.generated += n
            sums.generated_tokens += length * n
            self.generated.counts[length] += n
            generated.counts[length] += n
            if reason not in self._lost_to_age:
                sums.fresh += n
                sums.fresh_tokens += length * n
                self.fresh.counts[length] += n
            if fate == TRAINED:
                trained_tokens += length * n
                self.trained.counts[length] += n
                trained.counts[length] += n
            else:
                self.wasted_tokens[f"{kind}:{reason}"] += length * n
        if sums.generated:
            lost = sums.generated_tokens - sums.fresh_tokens
            self._count(prompt, dataset, sums, lost=lost, trained=trained_tokens)

    def _count(self, prompt: int | str, dataset: str, sums: _Sums, *, lost: int = 0, trained: int = 0) -> None:
        self.lost_tokens += lost
        self.prompts.add(
            prompt, dataset, generated=sums.generated_tokens, lost=lost, trained=trained, lost_group=not sums.fresh
        )
        self._whole.add(sums)
        self._recent.add(sums)
        self._window.append(sums)
        if len(self._window) > WINDOW_GROUPS:
            self._recent.add(self._window.popleft(), sign=-1)

    @property
    def withheld_tokens(self) -> int:
        """Tokens of trained samples that were too old to be trained on (mode `tokens`)."""
        return max(0, self._trainable_tokens - self._stepped_tokens)

    @property
    def cancelled_groups(self) -> int:
        return self._whole.cancelled

    @property
    def ratio(self) -> float | None:
        """Mean length of the samples that age let through over the mean length generated; 1 is unbiased.

        None before the first, and if groups were cancelled: those are the long ones, and their length is not known.
        """
        return self._whole.ratio

    @property
    def recent_ratio(self) -> float | None:
        """`ratio` over the last `WINDOW_GROUPS` groups that ended."""
        return self._recent.ratio

    def warns(self, below: float) -> bool:
        """Whether, in the last `WINDOW_GROUPS` groups, some were cancelled, all were lost, or the ratio is under
        `below`.

        False before there are that many groups.
        """
        if len(self._window) < WINDOW_GROUPS:
            return False
        recent = self._recent
        if recent.cancelled or (recent.generated and not recent.fresh):
            return True
        return recent.ratio is not None and recent.ratio < below

    def summary(self) -> dict[str, Any]:
        """Return means in tokens, the ratio, shares by length quarter, dataset and prompt, and waste by cause."""
        return {
            "generated_mean_tokens": self.generated.mean,
            "fresh_mean_tokens": self.fresh.mean,
            "trained_mean_tokens": self.trained.mean,
            "fresh_ratio": self.ratio,
            "quarters": self._quarters(),
            "datasets": {
                name: {"generated": generated.samples, "trained": trained.samples}
                for name, (generated, trained) in sorted(self.by_dataset.items())
            },
            "prompts": self.prompts.summary(),
            "wasted_tokens": dict(sorted(self.wasted_tokens.items())),
            "withheld_tokens": self.withheld_tokens,
            "cancelled_groups": self.cancelled_groups,
        }

    def _quarters(self) -> list[dict[str, Any]]:
        """Return, for each quarter of the generated samples from short to long, how many were fresh and trained."""
        out: list[dict[str, Any]] = []
        seen = 0
        for length in sorted(self.generated.counts):
            quarter = min(_QUARTERS - 1, seen * _QUARTERS // self.generated.samples)
            seen += self.generated.counts[length]
            if not out or out[-1]["quarter"] != quarter:
                out.append({"quarter": quarter, "up_to_tokens": 0, "generated": 0, "fresh": 0, "trained": 0})
            out[-1]["up_to_tokens"] = length
            for name, lengths in (("generated", self.generated), ("fresh", self.fresh), ("trained", self.trained)):
                out[-1][name] += lengths.counts[length]
        return out
