"""How good plans are: the fewest micro-batches, ranks as even as brute force finds them, one cost for all."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.engine.records import Plan
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.fan_out import plan_batch

CAPACITY = 16_384
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def log_normal(count: int, seed: int) -> dict[str, int]:
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, count)
    return {f"v0_p{i // 8}_g{i % 8}": min(CAPACITY, max(1, int(n))) for i, n in enumerate(drawn)}


def imbalance(plan: Plan) -> float:
    loads = [sum(batch.cost for batch in rank if not batch.filler) for rank in plan.ranks]
    return max(loads) * len(loads) / sum(loads)


def least(lengths: Sequence[int], ranks: int, budget: int) -> int:
    return ranks * math.ceil(math.ceil(sum(lengths) / budget) / ranks)


def best_possible(lengths: list[int], *, ranks: int, each: int, budget: int) -> float:
    """Try every way to deal samples to `ranks` ranks of `each` micro-batches, none empty: the least imbalance."""

    def fits(some: tuple[int, ...]) -> bool:
        if len(some) < each:
            return False
        return any(
            set(where) == set(range(each))
            and all(sum(n for n, at in zip(some, where, strict=True) if at == b) <= budget for b in range(each))
            for where in itertools.product(range(each), repeat=len(some))
        )

    mean = sum(lengths) / ranks
    found = float("inf")
    known: dict[tuple[int, ...], bool] = {}
    for where in itertools.product(range(ranks), repeat=len(lengths) - 1):
        hands = [tuple(n for n, at in zip(lengths, (0, *where), strict=True) if at == r) for r in range(ranks)]
        worst = max(map(sum, hands)) / mean
        if worst < found and all(known.setdefault(hand, fits(hand)) for hand in hands):
            found = worst
    return found


@pytest.mark.parametrize("seed", range(24))
def test_small_plans_are_as_even_as_brute_force_finds_them(seed: int) -> None:
    """Within 1.02, or within a hair of the best plan with as many micro-batches, if that is worse."""
    rng = random.Random(seed)
    ranks, count, budget = rng.choice([(2, 10, 64), (2, 9, 100), (3, 8, 48), (3, 8, 30)])
    lengths = [max(1, min(budget, int(rng.lognormvariate(2.3, 0.8)))) for _ in range(count)]
    plan = plan_batch({f"v0_p0_g{i}": n for i, n in enumerate(lengths)}, ranks=ranks, budget_tokens=budget)
    best = best_possible(lengths, ranks=ranks, each=len(plan.ranks[0]), budget=budget)
    assert imbalance(plan) <= max(1.02, best + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_64_samples_on_8_ranks_are_within_two_percent(seed: int) -> None:
    assert imbalance(plan_batch(log_normal(64, seed), ranks=8, budget_tokens=CAPACITY)) <= 1.02


@pytest.mark.parametrize("seed", range(8))
def test_512_samples_fill_what_the_bound_allows_and_are_even(seed: int) -> None:
    """Longest first into ranks is 1.026 here; the bound on micro-batches is met."""
    lengths = log_normal(512, seed)
    model = CostModel.of(QWEN_7B)
    for cost in (None, model.flops):
        plan = plan_batch(lengths, ranks=16, budget_tokens=CAPACITY, cost=cost)
        assert sum(map(len, plan.ranks)) == least(list(lengths.values()), 16, CAPACITY)
        assert imbalance(plan) <= 1.0005


def test_16384_samples_are_packed_to_the_bound_and_even() -> None:
    lengths = log_normal(16_384, 0)
    plan = plan_batch(lengths, ranks=16, budget_tokens=CAPACITY)
    assert sum(map(len, plan.ranks)) == least(list(lengths.values()), 16, CAPACITY)
    assert imbalance(plan) <= 1.0005
    assert all(batch.tokens <= CAPACITY for rank in plan.ranks for batch in rank)


@pytest.mark.parametrize(
    ("sizes", "budget"), [([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60), ([16, 14, 13, 12, 10, 8, 7, 7, 3], 30)]
)
def test_micro_batches_are_as_few_as_only_swaps_make_them(sizes: list[int], budget: int) -> None:
    """Longest first, worst fit or best, wants four for these, which just fit into three."""
    plan = plan_batch({f"v0_p0_g{i}": n for i, n in enumerate(sizes)}, ranks=1, budget_tokens=budget)
    assert [batch.tokens for batch in plan.ranks[0]] == [budget] * 3


def test_ranks_are_evened_out_by_cost_and_not_by_tokens() -> None:
    """Quadratic costs 64 + 4 x 16 = 128 = 8 x 16: eight samples of 4 stand against one of 8 and four of 4."""
    lengths = {f"v0_p0_g{i}": n for i, n in enumerate([8] + [4] * 12)}
    plan = plan_batch(lengths, ranks=2, budget_tokens=64, cost=lambda tokens: tokens.astype(np.float64) ** 2)
    assert [sum(batch.cost for batch in rank) for rank in plan.ranks] == [128, 128]
    assert sorted(sum(batch.tokens for batch in rank) for rank in plan.ranks) == [24, 32]


def test_costs_may_be_given_by_key() -> None:
    lengths = {f"v0_p0_g{i}": 5 for i in range(6)}
    costs = {"v0_p0_g0": 9.0, "v0_p0_g1": 4.0, "v0_p0_g2": 2.0, "v0_p0_g3": 1.0, "v0_p0_g4": 1.0, "v0_p0_g5": 1.0}
    for arrived in (lengths, dict(reversed(lengths.items()))):
        plan = plan_batch(arrived, ranks=2, budget_tokens=30, cost=costs)
        assert [sum(costs[key] for batch in rank for key in batch.keys) for rank in plan.ranks] == [9, 9]


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_cost_is_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="the cost of v0_p0_g1 is not a finite number"):
        plan_batch({"v0_p0_g0": 5, "v0_p0_g1": 6}, ranks=1, budget_tokens=30, cost={"v0_p0_g0": 1.0, "v0_p0_g1": cost})
