"""Theoretical peaks of accelerators: dense bfloat16 matrix products, FLOP/s, from their makers' data sheets."""

import re

PEAKS = (
    ("gb200", 2500e12),
    ("b200", 2250e12),
    ("h200 nvl", 835e12),
    ("h200", 989e12),
    ("h100 pcie", 756e12),
    ("h100 nvl", 835e12),
    ("h100", 989e12),
    ("h800 pcie", 756e12),
    ("h800", 989e12),
    ("h20", 148e12),
    ("a100", 312e12),
    ("a800", 312e12),
    ("a40", 149.7e12),
    ("a30", 165e12),
    ("a10", 125e12),
    ("l40s", 362e12),
    ("l40", 181e12),
    ("l4", 121e12),
    ("mi325x", 1307e12),
    ("mi300x", 1307e12),
    ("mi250x", 383e12),
)
"""Words of a device's name, as the driver spells it, and its peak; the first that matches counts."""


def peak_flops(device: str, *, configured: float | None = None) -> float | None:
    """Return a device's peak in FLOP/s, by name or as configured; None if it is not known (a CPU)."""
    if configured is not None:
        if not configured > 0:
            raise ValueError(f"a peak of {configured:g} FLOP/s; it must be above 0")
        return configured
    words = " ".join(re.split(r"[^a-z0-9]+", device.lower()))
    for name, peak in PEAKS:
        if re.search(rf"\bg?{name}\b", words):
            return peak
    return None
