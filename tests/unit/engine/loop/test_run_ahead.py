"""The budget of groups dispatched whose capacity has not come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.configs import RunConfig
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.testing.simulation import simulated_config


def config(staleness: int, groups: int) -> RunConfig:
    return simulated_config(rollout__max_staleness=staleness, rollout__groups_per_step=groups)


@pytest.mark.parametrize(("staleness", "limit"), [(0, 4), (1, 8), (2, 12)])
def test_the_limit_is_one_batch_more_than_the_staleness_allows(staleness: int, limit: int) -> None:
    """CASE-A11: with max_staleness 0 something is scheduled."""
    assert config(staleness, 4).run_ahead_groups == limit


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_under_which_nothing_could_run_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit is {limit}; it must be at least 1"):
        RunAhead(limit)


def test_more_than_the_limit_is_refused() -> None:
    budget = RunAhead(2)
    budget.take(0)
    budget.take(1)
    with pytest.raises(RuntimeError, match="2 groups are out"):
        budget.take(2)


def test_capacity_comes_back_once_a_group() -> None:
    """CASE-B8: no double release."""
    budget = RunAhead(3)
    for group in range(3):
        budget.take(group)
    assert budget.give_back([1, 1, 7]) in ([1], [1, 1])
    assert budget.free == 1
    assert budget.give_back([1]) == []
    assert budget.give_back([0, 2]) == [0, 2]
    assert (budget.used, budget.free) == (0, 3)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_used_is_the_number_of_distinct_groups_out(limit: int, moves: list[tuple[bool, int]]) -> None:
    budget, out = RunAhead(limit), set[int]()
    for taking, group in moves:
        if taking and group not in out and len(out) < limit:
            budget.take(group)
            out.add(group)
        elif not taking:
            assert budget.give_back([group]) == ([group] if group in out else [])
            out.discard(group)
        assert (budget.used, budget.free) == (len(out), limit - len(out))
