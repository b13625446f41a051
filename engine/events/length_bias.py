"""Whether age lets long answers through as often as short ones, and what tokens were wasted on.

Dropping what is too old discards long answers first, since they take longest to generate. A fold
over the event log: lengths of all samples generated, of those not lost to age (`fresh`), and of
those trained, in response tokens.
"""

from collections import Counter, defaultdict
from typing import Any

from asyncrl.engine.events.types import AnyEvent, Put, Settled
from asyncrl.engine.records.fate import CANCELLED, RUN_ENDED, STALE, TRAINED, split_fate
from asyncrl.engine.records.group import DATASET, RESPONSE_TOKENS

LOST_TO_AGE = frozenset({STALE, CANCELLED, "staleness/stale", "staleness/stale_tokens"})
_QUARTERS = 4


class Lengths:
    """Samples by length."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    @property
    def samples(self) -> int:
        return sum(self.counts.values())

    @property
    def tokens(self) -> int:
        return sum(length * n for length, n in self.counts.items())

    @property
    def mean(self) -> float | None:
        return self.tokens / self.samples if self.samples else None


class LengthBias:
    """Folds a run. A sample that was still on its way when the run ended counts nowhere."""

    def __init__(self) -> None:
        self.generated = Lengths()
        self.fresh = Lengths()
        self.trained = Lengths()
        self.by_dataset: defaultdict[str, tuple[Lengths, Lengths]] = defaultdict(lambda: (Lengths(), Lengths()))
        self.wasted_tokens: Counter[str] = Counter()
        self.cancelled_groups = 0
        self._waiting: dict[int, tuple[str, list[int]]] = {}

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Put():
                self._waiting[event.group] = (str(event.tags.get(DATASET)), list(event.tags.get(RESPONSE_TOKENS, ())))
            case Settled():
                if event.group not in self._waiting:
                    self.cancelled_groups += any(split_fate(fate)[1] == CANCELLED for fate in event.fates)
                    return
                dataset, lengths = self._waiting.pop(event.group)
                for (fate, length), samples in Counter(zip(event.fates, lengths, strict=True)).items():
                    self._count(dataset, fate, length, samples)

    def _count(self, dataset: str, fate: str, length: int, samples: int) -> None:
        kind, reason = split_fate(fate)
        if reason == RUN_ENDED:
            return
        if fate != TRAINED:
            self.wasted_tokens[f"{kind}:{reason}"] += length * samples
        self.generated.counts[length] += samples
        if reason not in LOST_TO_AGE:
            self.fresh.counts[length] += samples
        generated, trained = self.by_dataset[dataset]
        generated.counts[length] += samples
        if fate == TRAINED:
            trained.counts[length] += samples
            self.trained.counts[length] += samples

    @property
    def ratio(self) -> float | None:
        """Mean length of what age let through over mean length generated; 1 is fair.

        None before there is any, and once groups were cancelled: how long they would have become is
        not known, and they are the long ones.
        """
        if self.cancelled_groups or not self.generated.mean or self.fresh.mean is None:
            return None
        return self.fresh.mean / self.generated.mean

    def summary(self) -> dict[str, Any]:
        """Return means in tokens, the ratio, shares by length quarter and dataset, and waste by cause."""
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
            "wasted_tokens": dict(sorted(self.wasted_tokens.items())),
            "cancelled_groups": self.cancelled_groups,
        }

    def _quarters(self) -> list[dict[str, Any]]:
        """Return, by quarter of generated samples from short to long, how many came through and were trained."""
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
