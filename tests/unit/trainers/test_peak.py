"""Peaks by the names that drivers give devices."""

import pytest

from asyncrl.trainers.cost.peak import peak_flops


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("cpu", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_a_devices_peak_is_found_by_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_a_configured_peak_counts_whatever_the_name() -> None:
    assert peak_flops("cpu", configured=1e11) == 1e11
    with pytest.raises(ValueError, match="a peak of 0 FLOP/s"):
        peak_flops("cpu", configured=0)
