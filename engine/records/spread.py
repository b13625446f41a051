"""Whether a group's rewards differ at all, judged so that float noise never passes.

A standard deviation computed in floats is not exactly zero for equal rewards that binary
fractions cannot hold (`std([0.1] * 3)` is 1.4e-17), so the range is compared with the scale.
The tolerance is four steps of float32, whose noise rewards carry that a model or a tensor gave:
1e6 and 1e6 + 1 differ, 1e7 and 1e7 + 1 are float32 neighbours and do not.
"""

from collections.abc import Sequence

RELATIVE_TOLERANCE = 4 * 2.0**-23


def is_flat(rewards: Sequence[float], relative_tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Say whether finite `rewards` are equal up to `relative_tolerance` of the largest magnitude."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= relative_tolerance * max(abs(low), abs(high))
