"""Losses to age by prompt: counts, the worst, how uneven, and never more prompts than the limit."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.events.prompt_waste import PromptWaste, gini


def add(waste: PromptWaste, prompt: int, *, lost: int = 0, trained: int = 10, groups: int = 1) -> None:
    for _ in range(groups):
        waste.add(prompt, "d", generated=lost + trained, lost=lost, trained=trained, lost_group=not trained)


def test_a_prompt_counts_as_mostly_lost_past_half_of_its_tokens_or_groups() -> None:
    waste = PromptWaste()
    add(waste, 0)
    add(waste, 1, lost=10)
    add(waste, 2, lost=11)
    add(waste, 3, trained=0, lost=5)
    waste.add(4, "d", generated=0, lost=0, trained=0, lost_group=True)  # Cancelled: no tokens are known.
    assert waste.mostly_lost == 3
    add(waste, 4, groups=1)
    add(waste, 3, trained=20)
    assert waste.mostly_lost == 1
    said = waste.summary()
    assert (said["counted"], said["sampled"], said["mostly_lost"], said["all_lost"]) == (5, 1.0, 1, 0)


def test_the_worst_come_first_with_their_counts() -> None:
    waste = PromptWaste()
    for prompt in range(10):
        add(waste, prompt, lost=prompt, trained=0 if prompt > 7 else 1)
    worst = waste.summary()["worst"]
    assert [tally["prompt"] for tally in worst] == [9, 8, 7, 6, 5]
    expected: dict[str, Any] = {"prompt": 9, "dataset": "d", "groups": 1, "lost_groups": 1}
    assert worst[0] == {**expected, "generated_tokens": 9, "lost_tokens": 9, "trained_tokens": 0}


def test_a_run_that_loses_nothing_has_no_worst_and_no_gini() -> None:
    waste = PromptWaste()
    add(waste, 0)
    assert (waste.summary()["worst"], waste.summary()["waste_gini"]) == ([], None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_the_gini_coefficient_is_half_the_mean_difference_over_the_mean(values: list[int]) -> None:
    n, mean = len(values), sum(values) / len(values)
    difference = sum(abs(a - b) for a, b in itertools.product(values, repeat=2)) / n**2
    assert gini(values) == pytest.approx(difference / (2 * mean), abs=1e-12)


def test_past_the_limit_a_sample_of_the_prompts_stands_for_all() -> None:
    """A third of 20,000 prompts lose everything; at most 1,000 are held, and say so."""
    waste = PromptWaste(limit=1000)
    for prompt in range(20_000):
        add(waste, prompt, lost=6, trained=0) if prompt % 3 == 0 else add(waste, prompt)
    said = waste.summary()
    assert 400 < said["counted"] <= 1000
    assert said["counted"] / said["sampled"] == pytest.approx(20_000, rel=0.15)
    assert said["mostly_lost"] / said["counted"] == pytest.approx(1 / 3, abs=0.05)
    assert waste.mostly_lost == said["all_lost"]
