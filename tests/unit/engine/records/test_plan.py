"""A plan: equal numbers of micro-batches, and fillers that add no key."""

import pytest

from asyncrl.engine.records import MicroBatch, Plan


def test_ranks_with_different_counts_are_no_plan() -> None:
    """D1: the constructor itself refuses what would hang a collective."""
    one = MicroBatch(("a",), 3)
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        Plan(((one, MicroBatch(("b",), 2)), (one,)))


def test_the_keys_of_a_plan_are_those_that_are_trained() -> None:
    plan = Plan(
        (
            (MicroBatch(("a", "b"), 5), MicroBatch(("c",), 2)),
            (MicroBatch(("d",), 4), MicroBatch(("c",), 2, filler=True)),
        )
    )
    assert plan.keys == {"a", "b", "c", "d"}
    assert Plan(((MicroBatch(("a",), 1, filler=True),),)).keys == frozenset()
