"""Group-relative advantages from rewards in the tags; no tensor moves.

GRPO (arXiv 2402.03300, §4.1.2): A_i = (r_i - mean(r)) / std(r). Dr. GRPO (arXiv 2503.20783,
eq. 3) leaves the division out. RLOO (arXiv 2402.14740, eq. 8) compares with the mean of the
siblings. Statistics are over live samples.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from asyncrl.engine.records.spread import is_flat

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]


def group_advantages(rewards: Sequence[float], *, baseline: Baseline, scale: Scale) -> list[float]:
    """Return one advantage a live sample, in order; all 0 when the rewards are flat.

    With `std` the divisor is the population's standard deviation of what the baseline is taken
    from; where that is flat (leave one out, equal siblings) there is no division. ValueError for
    a reward that is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite to have advantages: {list(rewards)}")
    if is_flat(rewards):
        return [0.0] * len(rewards)
    if baseline == "mean":
        mean, divisor = _mean_and_divisor(rewards, scale)
        return [(reward - mean) / divisor for reward in rewards]
    out = []
    for i, reward in enumerate(rewards):
        mean, divisor = _mean_and_divisor([*rewards[:i], *rewards[i + 1 :]], scale)
        out.append((reward - mean) / divisor)
    return out


def _mean_and_divisor(base: Sequence[float], scale: Scale) -> tuple[float, float]:
    divisor = 1.0 if scale == "none" or is_flat(base) else statistics.pstdev(base)
    return statistics.fmean(base), divisor
