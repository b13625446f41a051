"""The report of a run, by one fold over its events; two runs side by side."""

from collections import Counter
from typing import Any

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import AnyEvent, ClaimReturned, Judged, OwnerDead, Settled
from asyncrl.engine.records.fate import DROPPED, FAILED_FATE, MASKED, split_fate

Line = tuple[str, Any]


class RunReport:
    """Groups judged, kept and dropped by reason; samples by fate, ages, waste, steps and length bias.

    A group that was kept at the claim and dropped later counts as dropped; one that was claimed and judged
    again, since its first claim ended, counts once.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.progress = Progress()
        self._judged: set[int] = set()
        self._kept: set[int] = set()
        self.dropped: Counter[str] = Counter()

    def apply(self, event: AnyEvent) -> None:
        self.ledger.apply(event)
        self.progress.apply(event)
        match event:
            case Judged():
                self._judged.add(event.group)
                if event.dropped is None:
                    self._kept.add(event.group)
                else:
                    self.dropped[event.dropped] += 1
            case ClaimReturned() | OwnerDead():
                self._kept.difference_update(event.groups)
            case Settled() if event.group in self._kept:
                reasons = {split_fate(fate)[1] for fate in event.fates if split_fate(fate)[0] == DROPPED}
                if reasons and not any(split_fate(fate)[0] in ("trained", MASKED) for fate in event.fates):
                    self._kept.discard(event.group)
                    self.dropped[min(reasons)] += 1

    @property
    def judged(self) -> int:
        return len(self._judged)

    def lines(self) -> list[Line]:
        """Return names and values, the reasons under their kind."""
        progress, bias = self.progress, self.progress.length_bias
        samples = sum(progress.ages.values())
        lines: list[Line] = [
            ("batches judged", progress.batches),
            ("steps", progress.steps),
            ("groups judged", self.judged),
            ("groups kept", len(self._kept)),
        ]
        lines += [(f"groups dropped: {reason}", n) for reason, n in sorted(self.dropped.items())]
        lines += [("samples trained", self.ledger.trained)]
        for kind in (MASKED, DROPPED, FAILED_FATE):
            lines += [(f"samples {kind}: {reason}", n) for reason, n in self.ledger.by_reason(kind).items()]
        lines += [(f"trained at age {age}", n) for age, n in sorted(progress.ages.items())]
        mean = sum(age * n for age, n in progress.ages.items()) / samples if samples else None
        lines += [
            ("mean trained age (versions)", mean),
            ("tokens trained", progress.trained_tokens),
            ("tokens wasted", sum(bias.wasted_tokens.values())),
        ]
        lines += [(f"tokens wasted, {cause}", n) for cause, n in sorted(bias.wasted_tokens.items())]
        return [
            *lines,
            ("mean length generated (tokens)", bias.generated.mean),
            ("mean length trained (tokens)", bias.trained.mean),
            ("length kept by age (1 is fair)", bias.ratio),
        ]


def side_by_side(before: RunReport, after: RunReport) -> list[tuple[str, str, str]]:
    """Return lines of name, before and after; what one side lacks is 0 there."""
    left, right = dict(before.lines()), dict(after.lines())
    names = [name for name, _ in before.lines()]
    above = -1
    for name, _ in after.lines():
        if name not in left:
            names.insert(above + 1, name)
        above = names.index(name)
    return [(name, shown(left.get(name, 0)), shown(right.get(name, 0))) for name in names]


def shown(value: Any) -> str:
    """Write a figure: a dash where there is none, three digits after the point."""
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
