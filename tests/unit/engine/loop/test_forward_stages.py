"""How many forward passes the ranks of a stage get."""

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, SampleWork, Work
from asyncrl.engine.testing.simulation import simulated_config


class Counted:
    """A rank that does nothing, and says that it did."""

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        return {key: (0.0, 0.0) for batch in work.micro_batches if not batch.filler for key in batch.keys}


@pytest.mark.parametrize(("sharding", "counts"), [("none", [2, 1]), ("full", [2, 2])])
def test_ranks_that_share_a_model_run_the_same_number_of_forward_passes(sharding: str, counts: list[int]) -> None:
    """Each layer of a pass waits for all of them: one pass more would wait for good."""
    config = simulated_config(
        trainer__ranks=2,
        trainer__sharding=sharding,
        run__runtime="ray",
        trainer__micro_batch_tokens=12,
        trainer__forward_tokens=12,
    )
    keys = sample_keys(0, 0, 3)
    samples = {key: SampleWork(key, 2, 8, 1.0) for key in keys}
    selection = Selection(
        samples=samples, lengths=dict.fromkeys(keys, 10), ages=dict.fromkeys(keys, 0), masks={}, reward_sum=0.0
    )
    given: list[Sequence[Work]] = []
    ranks: Any = [Counted(), Counted()]
    stages = Stages(config, ranks=ranks, cost=None, given=given.append)
    run_virtual(lambda: stages.logprobs(selection, step=1, write=False))
    assert sorted((len(work.micro_batches) for work in given[0]), reverse=True) == counts
