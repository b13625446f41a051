"""Group-relative advantages from rewards in the tags; no tensor moves.

GRPO (arXiv 2402.03300, §4.1.2): A_i = (r_i - mean(r)) / std(r). Dr. GRPO (arXiv 2503.20783,
eq. 3) leaves the division out. RLOO (arXiv 2402.14740, eq. 8) compares with the mean of the
siblings, which is n / (n - 1) times as far: r_i - mean(r without i) = n / (n - 1) · (r_i - mean(r)).
Statistics are over live samples.

The divisor is the whole group's standard deviation, whatever the baseline. That of the siblings alone
would be noise if one sample is far off: [1, 0.001, 0, 0] would give 2120, not 2.3.
Since no one of n values is further from the mean than √(n - 1) standard deviations (P. Samuelson, "How
deviant can you be?", 1968), no advantage is larger than √(n - 1), or n / √(n - 1) with leave one out.

>>> [round(a, 3) for a in group_advantages([1.0, 0.001, 0.0, 0.0], baseline="leave_one_out", scale="std")]
[2.309, -0.768, -0.771, -0.771]
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from asyncrl.engine.records.spread import is_flat

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]


def group_advantages(rewards: Sequence[float], *, baseline: Baseline, scale: Scale) -> list[float]:
    """Return one advantage per live sample, in order; all are 0 if the rewards are flat.

    With `std` the divisor is the population standard deviation of all rewards. ValueError if a reward is not
    finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite to have advantages: {list(rewards)}")
    if is_flat(rewards):
        return [0.0] * len(rewards)
    # Scaled to near 1 by a power of two, which does not round; else the deviation of [0, 5e-324] would be 0.
    exponent = math.frexp(max(map(abs, rewards)))[1]
    near_one = [math.ldexp(reward, -exponent) for reward in rewards]
    n, mean = len(rewards), statistics.fmean(near_one)
    factor = n / (n - 1) if baseline == "leave_one_out" else 1.0
    if scale == "none":
        return [math.ldexp(factor * (reward - mean), exponent) for reward in near_one]
    deviation = statistics.pstdev(near_one)
    return [factor * (reward - mean) / deviation for reward in near_one]
