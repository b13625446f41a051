"""The plan: equal micro-batch counts, budgets kept, every key once, one plan for one batch."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.trainers.fan_out import over_budget, plan_batch

BUDGET = 24
some_lengths = st.lists(st.integers(1, BUDGET), min_size=1, max_size=24)
some_ranks = st.integers(1, 6)


def named(lengths: list[int]) -> dict[str, int]:
    return {f"v0_p0_g{i}": tokens for i, tokens in enumerate(lengths)}


def batches(plan: Plan) -> list[MicroBatch]:
    return [batch for rank in plan.ranks for batch in rank]


def check(plan: Plan, lengths: dict[str, int], *, ranks: int, budget: int) -> None:
    """Invariant 6, and that a micro-batch's token count is its keys'."""
    assert len(plan.ranks) == ranks
    assert len({len(rank) for rank in plan.ranks}) == 1
    assert sorted(key for batch in batches(plan) if not batch.filler for key in batch.keys) == sorted(lengths)
    assert plan.keys == frozenset(lengths)
    for batch in batches(plan):
        assert batch.keys
        assert batch.tokens == sum(lengths[key] for key in batch.keys)
        assert batch.tokens <= budget


@settings(deadline=None, max_examples=50)
@given(some_lengths, some_ranks)
def test_any_lengths_on_any_ranks_make_a_whole_plan(lengths: list[int], ranks: int) -> None:
    """Invariant 6, D1, D3, D6; fillers only where there are fewer samples than micro-batches."""
    plan = plan_batch(named(lengths), ranks=ranks, budget_tokens=BUDGET)
    check(plan, named(lengths), ranks=ranks, budget=BUDGET)
    fillers = sum(batch.filler for batch in batches(plan))
    assert fillers == max(0, len(batches(plan)) - len(lengths))
    assert fillers < ranks
    assert all(any(not batch.filler for batch in rank) for rank in plan.ranks) or len(lengths) < ranks


@settings(deadline=None, max_examples=50)
@given(some_lengths, some_ranks, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_arrival(lengths: list[int], ranks: int, rng: random.Random) -> None:
    items = list(named(lengths).items())
    first = plan_batch(dict(items), ranks=ranks, budget_tokens=BUDGET)
    rng.shuffle(items)
    assert plan_batch(dict(items), ranks=ranks, budget_tokens=BUDGET) == first


def min_bins(lengths: list[int], budget: int) -> int:
    """Try every assignment: the fewest bins that hold `lengths`."""
    for count in range(1, len(lengths) + 1):
        for where in itertools.product(range(count), repeat=len(lengths)):
            if all(sum(n for n, at in zip(lengths, where, strict=True) if at == b) <= budget for b in range(count)):
                return count
    raise AssertionError("a sample is over the budget")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=5), st.integers(1, 3))
def test_tiny_plans_use_nearly_the_fewest_micro_batches(lengths: list[int], ranks: int) -> None:
    """Against brute force: never fewer than can hold the samples, at most one more a rank."""
    used = len(batches(plan_batch(named(lengths), ranks=ranks, budget_tokens=10)))
    fewest = -(-min_bins(lengths, 10) // ranks) * ranks
    assert fewest <= used <= fewest + ranks


@pytest.mark.parametrize("lengths", [[8, 8, 8, 2, 2, 2], [8, 8, 8]])
def test_ranks_get_the_same_number_of_micro_batches(lengths: list[int]) -> None:
    """D1: two ranks, cap 8."""
    check(plan_batch(named(lengths), ranks=2, budget_tokens=8), named(lengths), ranks=2, budget=8)


@pytest.mark.parametrize(("lengths", "budget", "count"), [([7] * 8, 8, 8), ([6, 6, 6], 10, 3), ([5, 5, 5, 5], 10, 2)])
def test_the_count_is_what_fits_and_not_the_sum_over_the_cap(lengths: list[int], budget: int, count: int) -> None:
    """D3: ceil(sum / cap) would put two samples of 7 into one micro-batch of 8."""
    plan = plan_batch(named(lengths), ranks=1, budget_tokens=budget)
    check(plan, named(lengths), ranks=1, budget=budget)
    assert len(batches(plan)) == count


@pytest.mark.parametrize(("lengths", "over"), [([21], [0]), ([20], []), ([5, 21, 5], [1]), ([22, 4, 21], [0, 2])])
def test_a_sample_over_the_budget_is_named_before_anything_is_planned(lengths: list[int], over: list[int]) -> None:
    """D4: cap 20. 20 fits alone; 21 is an error that names key, length and cap; its siblings can be planned."""
    found = over_budget(named(lengths), 20)
    assert found == [f"v0_p0_g{i}" for i in over]
    if found:
        with pytest.raises(ValueError, match=rf"{found[0]} has {lengths[over[0]]} tokens, over the budget of 20"):
            plan_batch(named(lengths), ranks=1, budget_tokens=20)
    rest = {key: tokens for key, tokens in named(lengths).items() if key not in found}
    if rest:
        check(plan_batch(rest, ranks=1, budget_tokens=20), rest, ranks=1, budget=20)


@pytest.mark.parametrize(("samples", "fillers"), [(9, 0), (3, 1), (1, 3)])
def test_survivors_that_ranks_do_not_divide_are_all_planned(samples: int, fillers: int) -> None:
    """D6: four ranks with 9, 3 and 1 survivors."""
    lengths = named([5] * samples)
    plan = plan_batch(lengths, ranks=4, budget_tokens=100)
    check(plan, lengths, ranks=4, budget=100)
    assert sum(batch.filler for batch in batches(plan)) == fillers


def test_no_survivor_is_no_plan() -> None:
    """D6: a batch of 0 samples does not make a step."""
    with pytest.raises(ValueError, match="no samples"):
        plan_batch({}, ranks=4, budget_tokens=100)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 5, 0]])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_empty_samples_do_not_break_the_balancer(lengths: list[int], ranks: int) -> None:
    """D13: a sample with no tokens at all."""
    plan = plan_batch(named(lengths), ranks=ranks, budget_tokens=8)
    check(plan, named(lengths), ranks=ranks, budget=8)


def test_fillers_repeat_the_shortest_sample() -> None:
    plan = plan_batch(named([9, 2, 5]), ranks=4, budget_tokens=10)
    assert [batch.keys for batch in batches(plan) if batch.filler] == [("v0_p0_g1",)]


def test_ranks_carry_nearly_equal_loads() -> None:
    plan = plan_batch(named([16, 15, 9, 8, 7, 6, 2, 1]), ranks=2, budget_tokens=16)
    loads = [sum(batch.tokens for batch in rank) for rank in plan.ranks]
    assert loads == [32, 32]


def test_a_plan_with_unequal_counts_cannot_be_built() -> None:
    one = MicroBatch(("v0_p0_g0",), 3)
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        Plan(((one,), (one, one)))
