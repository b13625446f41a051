"""Whether the rewards of a group differ by more than float noise.

In floats the standard deviation of equal rewards is not always zero (`std([0.1] * 3)` is 1.4e-17), so the range is
compared with the scale. The tolerance is four steps of float32, the noise of rewards that come from a model or a
tensor: 1e6 and 1e6 + 1 differ; 1e7 and 1e7 + 1, which are float32 neighbours, do not.
"""

from collections.abc import Sequence

RELATIVE_TOLERANCE = 4 * 2.0**-23


def is_flat(rewards: Sequence[float], relative_tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Return whether finite `rewards` differ by at most `relative_tolerance` times the largest absolute value."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= relative_tolerance * max(abs(low), abs(high))
