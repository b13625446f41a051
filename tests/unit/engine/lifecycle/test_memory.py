"""The memory of a rank, estimated from the configuration."""

import pytest

from asyncrl.configs import load, parse_set
from asyncrl.engine.lifecycle.memory import memory_of_rank


def memory(*settings: str) -> dict[str, float]:
    return memory_of_rank(load("default", [parse_set(setting) for setting in settings]).config)


def test_what_ranks_divide_is_divided() -> None:
    """Of 4 ranks, two hold a replica: half the weights each, and half of the moments of that."""
    whole = memory()
    divided = memory("trainer.backend=megatron", "trainer.ranks=4", "trainer.tensor_parallel=2")
    assert divided["weights"] == pytest.approx(whole["weights"] / 2)
    assert divided["gradients"] == pytest.approx(whole["gradients"] / 2)
    assert divided["optimizer"] == pytest.approx(whole["optimizer"] / 4)


def test_bfloat16_has_masters_in_float32() -> None:
    narrow = memory("trainer.backend=megatron", "trainer.ranks=1", "model.dtype=bfloat16")
    assert narrow["gradients"] == pytest.approx(2 * narrow["weights"])
    assert narrow["optimizer"] == pytest.approx(6 * narrow["weights"])
