"""Figures of an evaluation and how sure they are: pass@k, and 95 % intervals over prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: two-sided 95 %."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; `low` and `high` are None where one prompt says nothing of the spread."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the chance that at least one of `k` samples passes, of which `passed` of `samples` did; no bias.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code" (2021,
    arXiv:2107.03374), equation 1. ValueError if k is not within 1 … n. Example: of 4 samples 2 passed; two of them
    both fail in 1 of 6 draws, so pass@2 is 5/6.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples is not defined")
    draws = math.comb(samples, k)
    # Of whole numbers, so that it is rounded once.
    return (draws - math.comb(samples - passed, k)) / draws


def reported_k(samples: int) -> list[int]:
    """Return the k of pass@k that are reported: the powers of two up to the samples per prompt, and their number."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def share(values: Sequence[float], *, draws: float) -> Estimate:
    """Return the mean of shares in [0, 1], one per prompt, with its Wilson score interval (Wilson, 1927).

    The interval is that of a proportion of as many trials as would have the variance that the mean has over prompts,
    p (1 - p) / (s² / P), as surveys use it (Dean and Pagano, 2015); at most `draws`, so that prompts that are equal by
    chance do not make it sure. With one sample per prompt it is Wilson's own: 8 of 10 give 0.8 within 0.49 … 0.943.
    """
    prompts = len(values)
    mean = math.fsum(values) / prompts
    variance = math.fsum((value - mean) ** 2 for value in values) / prompts
    trials = min(mean * (1 - mean) * prompts / variance, draws) if variance else max(draws, prompts)
    if mean in (0.0, 1.0):  # All fail, or all pass: prompts alone say how sure that is.
        trials = prompts
    middle = (mean + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2))
    # Rounding would leave the bound of all, or of none, a little inside.
    return Estimate(mean, max(0.0, middle - half) if mean else 0.0, min(1.0, middle + half) if mean < 1 else 1.0)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one number per prompt, with its normal interval: 1.96 standard errors on both sides."""
    count = len(values)
    value = math.fsum(values) / count
    if count == 1:
        return Estimate(value, None, None)
    error = math.sqrt(math.fsum((one - value) ** 2 for one in values) / (count - 1) / count)
    return Estimate(value, value - Z * error, value + Z * error)
