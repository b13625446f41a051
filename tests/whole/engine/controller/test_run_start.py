"""A run's start: every rank holds the same version 0, or the run ends before it generates."""

from collections.abc import Mapping

import pytest
import torch

from asyncrl.engine.errors import VersionError
from asyncrl.engine.events.types import Dispatched, PublishStarted
from asyncrl.engine.testing.fakes import FakeRank
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.weights.digest import check_equal, digest


class Odd(FakeRank):
    """The second of its kind filled a weight in by itself."""

    async def digest(self) -> Mapping[str, int]:
        return {"embed": 5, "lm_head": 7 + (self.name == "rank1")}


def test_ranks_with_other_weights_end_the_run_before_they_are_published() -> None:
    """FOUND-L7: the error names the rank and the weight."""
    outcome = simulate(simulated_config(trainer__ranks=3), rank=Odd)
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, VersionError)
    assert "rank1 does not hold the weights of rank0 at version 0: 1 of 2 differ, such as lm_head" in str(
        outcome.ending.error
    )
    assert not outcome.of(PublishStarted)
    assert not outcome.of(Dispatched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_digest_tells_one_changed_number_and_no_change(dtype: torch.dtype) -> None:
    """FOUND-L7: exact, whatever the type; zeros of either sign differ, as the bits do."""
    weights = {"a": (torch.arange(70) % 3).to(dtype).reshape(7, 10), "b": torch.zeros((), dtype=dtype)}
    same = {name: tensor.clone() for name, tensor in weights.items()}
    check_equal({"rank0": digest(weights), "rank1": digest(same)})
    same["a"][3, 4] = 1 - same["a"][3, 4].to(torch.int64)
    with pytest.raises(VersionError, match=r"rank1 does not hold the weights of rank0.* 1 of 2 differ, such as a"):
        check_equal({"rank0": digest(weights), "rank1": digest(same)})
    with pytest.raises(VersionError, match="such as b"):
        check_equal({"rank0": digest(weights), "rank1": {"a": digest(weights)["a"]}})
