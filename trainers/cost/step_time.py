"""Seconds of a rank's step from its predicted FLOPs: a line that follows the measurements.

Invariant: neither the slope (seconds per FLOP) nor the overhead is ever below zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

UNIT = 1e12
"""FLOPs in the sums, so that their squares stay near 1."""
OUTLIER = 3.0
"""A step that takes more than this many times the predicted seconds counts less."""
SPREAD = 1e-3
"""If the FLOPs vary by less than this share, they do not tell the overhead."""


@dataclass(slots=True)
class StepTime:
    """Least squares of (FLOPs, seconds) of ranks; each later step multiplies the weight of the steps before it by
    `forgetting`.

    The first `skip_steps` steps, which compile and warm up, are not counted. A step that takes r > 3 times
    as long as predicted counts (3 / r)^2: one more compilation hardly matters, a machine that has become
    slower does after some steps. The sums are those of recursive least squares with exponential forgetting
    (L. Ljung, "System Identification", 2nd edition, 1999, section 11.2).
    """

    forgetting: float = 0.95
    skip_steps: int = 1
    steps: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Of weights, FLOPs, seconds, squared FLOPs, FLOPs times seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.forgetting <= 1:
            raise ValueError(f"forgetting is {self.forgetting}; it must be above 0 and at most 1")

    def observe(self, flops: Sequence[float], seconds: Sequence[float]) -> None:
        """Count a step: FLOPs and seconds by rank. Pairs that are not positive and finite are ignored."""
        if len(flops) != len(seconds):
            raise ValueError(f"{len(flops)} FLOPs and {len(seconds)} times; there must be one of each for every rank")
        pairs = [(f / UNIT, s) for f, s in zip(flops, seconds, strict=True) if 0 < f < math.inf and 0 < s < math.inf]
        if not pairs:
            return
        self.steps += 1
        if self.steps <= self.skip_steps:
            return
        weight = self._weight(pairs)
        one = [sum(some) for some in zip(*((1.0, f, s, f * f, f * s) for f, s in pairs), strict=True)]
        self.sums = [self.forgetting * old + weight * new for old, new in zip(self.sums, one, strict=True)]

    def seconds(self, flops: Sequence[float]) -> list[float] | None:
        """Predict each rank's seconds from its FLOPs; None before the first step that counts."""
        if self.seconds_per_flop is None:
            return None
        return [self.overhead_s + self.seconds_per_flop * f for f in flops]

    @property
    def seconds_per_flop(self) -> float | None:
        """The slope; None before the first step that counts."""
        return self._line()[0] / UNIT if self.sums[0] else None

    @property
    def overhead_s(self) -> float:
        """Seconds of a rank's step whatever its FLOPs."""
        return self._line()[1] if self.sums[0] else 0.0

    def _line(self) -> tuple[float, float]:
        n, f, s, ff, fs = self.sums
        spread = n * ff - f * f
        if spread > SPREAD**2 * f * f:
            slope, overhead = (n * fs - f * s) / spread, (s * ff - f * fs) / spread
            if slope >= 0 and overhead >= 0:
                return slope, overhead
            if slope < 0:
                return 0.0, s / n
        return fs / ff, 0.0

    def _weight(self, pairs: Sequence[tuple[float, float]]) -> float:
        if not self.sums[0]:
            return 1.0
        slope, overhead = self._line()
        ratio = sum(s for _, s in pairs) / sum(overhead + slope * f for f, _ in pairs)
        return min(1.0, OUTLIER / ratio) ** 2
