"""The plan's options: alignment, groups, updates, forward-only stages, no balancing, pipeline order."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.trainers.fan_out import over_budget, plan_batch
from asyncrl.trainers.loss.advantages import group_advantages
from asyncrl.trainers.planning.samples import Floats, Ints

BUDGET = 48
some_lengths = st.lists(st.integers(1, BUDGET), min_size=1, max_size=40)


def square(tokens: Any) -> Any:
    return tokens * 1.0 * tokens


def inverse(tokens: Any) -> Any:
    """The longer, the cheaper: room for a swap must hold both ways."""
    return 100.0 / tokens


some_options = st.fixed_dictionaries(
    {
        "align": st.sampled_from([1, 2, 4, 16]),
        "updates": st.integers(1, 3),
        "balance": st.booleans(),
        "order": st.sampled_from(["costliest_first", "cheap_ends"]),
        "grouped": st.booleans(),
        "cost": st.sampled_from([None, square, inverse]),
    }
)


def named(lengths: list[int]) -> dict[str, int]:
    return {f"v0_p{i // 4}_g{i % 4}": tokens for i, tokens in enumerate(lengths)}


def group_of(key: str) -> str:
    return key.rpartition("_")[0]


def padded(tokens: int, align: int) -> int:
    return -(-tokens // align) * align


def planned(lengths: dict[str, int], *, ranks: int, grouped: bool, **options: Any) -> Plan:
    return plan_batch(
        lengths,
        ranks=ranks,
        budget_tokens=BUDGET,
        groups={key: group_of(key) for key in lengths} if grouped else None,
        **options,
    )


def check(plan: Plan, lengths: dict[str, int], *, align: int) -> None:
    """Invariant 6 but for the counts, which are the plan's own invariant."""
    batches = [batch for rank in plan.ranks for batch in rank]
    real = [batch for batch in batches if not batch.filler]
    assert sorted(key for batch in real for key in batch.keys) == sorted(lengths)
    for batch in batches:
        assert batch.keys
        assert batch.tokens == sum(lengths[key] for key in batch.keys)
        assert sum(padded(lengths[key], align) for key in batch.keys) <= BUDGET


@settings(deadline=None, max_examples=50)
@given(some_lengths, st.integers(1, 5), some_options, st.randoms(use_true_random=False))
def test_every_plan_is_whole_whatever_the_options(
    lengths: list[int], ranks: int, options: dict[str, Any], rng: random.Random
) -> None:
    """Invariant 6; and balanced plans do not depend on the order of arrival."""
    items = list(named(lengths).items())
    plan = planned(dict(items), ranks=ranks, **options)
    check(plan, dict(items), align=options["align"])
    assert plan.lockstep
    assert len(plan.ranks) == ranks
    assert len({len(rank) for rank in plan.ranks}) == 1
    updates = min(options["updates"], len(lengths))
    assert plan.updates == () if updates == 1 else sum(plan.updates) == len(plan.ranks[0])
    assert len(plan.updates) in {0, updates}
    fillers = sum(batch.filler for rank in plan.ranks for batch in rank)
    assert fillers < ranks * updates
    if options["balance"]:
        rng.shuffle(items)
        assert planned(dict(items), ranks=ranks, **options) == plan


@settings(deadline=None, max_examples=50)
@given(some_lengths, st.integers(1, 5), st.sampled_from([1, 8]), st.booleans())
def test_forward_only_plans_are_whole_without_fillers(
    lengths: list[int], ranks: int, align: int, balance: bool
) -> None:
    plan = plan_batch(
        named(lengths), ranks=ranks, budget_tokens=BUDGET, align=align, forward_only=True, balance=balance
    )
    check(plan, named(lengths), align=align)
    assert len(plan.ranks) == ranks
    assert not any(batch.filler for rank in plan.ranks for batch in rank)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("seed", range(40))
def test_a_search_does_not_live_on_rounding_errors(seed: int) -> None:
    """Costs that no float holds exactly: a gain of one bit does not count, so the search ends."""
    rng = random.Random(seed)
    lengths = named([rng.randint(1, BUDGET) for _ in range(rng.randint(2, 24))])
    plan_batch(lengths, ranks=rng.randint(2, 5), budget_tokens=BUDGET, cost=inverse, updates=rng.randint(1, 3))


def test_forward_only_ranks_may_differ_in_micro_batches() -> None:
    """Costs are even, whatever the number of samples or micro-batches."""
    plan = plan_batch(named([48, 12, 12, 12, 12]), ranks=2, budget_tokens=48, forward_only=True)
    assert [[batch.tokens for batch in rank] for rank in plan.ranks] == [[48], [48]]
    plan = plan_batch(named([40, 24, 24]), ranks=2, budget_tokens=40, forward_only=True)
    assert sorted(len(rank) for rank in plan.ranks) == [1, 2]
    with pytest.raises(ValueError, match="updates is 2"):
        plan_batch(named([4, 4]), ranks=1, budget_tokens=40, forward_only=True, updates=2)


def test_alignment_counts_against_the_budget() -> None:
    """Samples of 5 take 8 of 16: two a micro-batch, not three; one of 9 takes 16."""
    plan = plan_batch(named([5] * 6), ranks=1, budget_tokens=16, align=8)
    assert [len(batch.keys) for batch in plan.ranks[0]] == [2, 2, 2]
    assert over_budget({"v0_p0_g0": 16, "v0_p0_g1": 17}, 16, align=8) == ["v0_p0_g1"]
    assert over_budget({"v0_p0_g0": 16, "v0_p0_g1": 17}, 20, align=8) == ["v0_p0_g1"]
    with pytest.raises(ValueError, match=r"v0_p0_g0 has 17 tokens, over the budget of 20 \(in multiples of 8\)"):
        plan_batch({"v0_p0_g0": 17}, ranks=1, budget_tokens=20, align=8)


def test_updates_share_samples_and_costs() -> None:
    lengths = named([40, 38, 33, 30, 22, 21, 20, 17, 12, 9, 8, 6])
    plan = plan_batch(lengths, ranks=2, budget_tokens=BUDGET, updates=3)
    start, loads, counts = 0, [], []
    for count in plan.updates:
        some = [batch for rank in plan.ranks for batch in rank[start : start + count] if not batch.filler]
        loads.append(sum(batch.tokens for batch in some))
        counts.append(sum(len(batch.keys) for batch in some))
        start += count
    assert counts == [4, 4, 4]
    assert max(loads) - min(loads) <= 4


def test_a_plan_whose_updates_do_not_add_up_cannot_be_built() -> None:
    one = MicroBatch(("v0_p0_g0",), 3)
    with pytest.raises(ValueError, match=r"updates of \[1, 2\] micro-batches; the ranks have \[2\]"):
        Plan(((one, one),), updates=(1, 2))


def readers(plan: Plan) -> int:
    """Count the reads of groups by ranks."""
    return len({(rank, group_of(key)) for rank, hand in enumerate(plan.ranks) for b in hand for key in b.keys})


def heaviest(plan: Plan) -> float:
    return max(sum(batch.cost for batch in rank) for rank in plan.ranks)


def test_a_groups_samples_share_a_rank_where_lengths_allow_it() -> None:
    """Equal lengths cost nothing to gather: each group is read once."""
    lengths = named([10] * 32)
    rng = random.Random(5)
    names = {key: f"group {n % 8}" for n, key in enumerate(rng.sample(sorted(lengths), 32))}
    plan = plan_batch(lengths, ranks=4, budget_tokens=40, groups=names)
    assert len({(rank, names[key]) for rank, hand in enumerate(plan.ranks) for b in hand for key in b.keys}) == 8


@pytest.mark.parametrize("seed", range(5))
def test_gathering_groups_costs_no_balance_beyond_the_tolerance(seed: int) -> None:
    rng = random.Random(seed)
    lengths = named([rng.randint(1, 200) for _ in range(128)])
    groups = {key: group_of(key) for key in lengths}
    apart = plan_batch(lengths, ranks=4, budget_tokens=1000)
    near = plan_batch(lengths, ranks=4, budget_tokens=1000, groups=groups, tolerance=0.02)
    assert readers(near) < readers(apart)
    mean = sum(lengths.values()) / 4
    assert heaviest(near) <= max(heaviest(apart), mean * 1.02)
    strict = plan_batch(lengths, ranks=4, budget_tokens=1000, groups=groups, tolerance=0)
    assert heaviest(strict) <= heaviest(apart)
    assert readers(strict) <= readers(apart)


@pytest.mark.parametrize("seed", range(5))
def test_gathering_groups_keeps_the_budget(seed: int) -> None:
    """Micro-batches that are nearly full have no room for a longer sample, however near its group."""
    rng = random.Random(seed)
    lengths = named([rng.randint(1, BUDGET // 3) for _ in range(128)])
    groups = {key: group_of(key) for key in lengths}
    plan = plan_batch(lengths, ranks=2, budget_tokens=BUDGET, groups=groups, tolerance=0.5)
    check(plan, lengths, align=1)
    assert sum(map(sum, ([b.tokens for b in rank] for rank in plan.ranks))) > 0.9 * BUDGET * 2 * len(plan.ranks[0])


def test_without_balancing_the_given_order_stays() -> None:
    """D16: the flag is heeded, and advantages go by group, not by neighbourhood, either way."""
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    keys = [f"v0_p{i // 4}_g{i % 4}" for i in order]
    lengths = {key: 3 + i for key, i in zip(keys, order, strict=True)}
    reward = {key: float(i * i) for key, i in zip(keys, order, strict=True)}
    off = plan_batch(lengths, ranks=2, budget_tokens=20, balance=False)
    on = plan_batch(lengths, ranks=2, budget_tokens=20)
    assert [key for rank in off.ranks for batch in rank for key in batch.keys] == keys
    assert [key for rank in on.ranks for batch in rank for key in batch.keys] != keys

    def advantages(plan: Plan) -> dict[str, float]:
        met = [key for rank in plan.ranks for batch in rank for key in batch.keys]
        out: dict[str, float] = {}
        for group in sorted({group_of(key) for key in met}):
            mine = sorted(key for key in met if group_of(key) == group)
            found = group_advantages([reward[key] for key in mine], baseline="mean", scale="std")
            out |= dict(zip(mine, found, strict=True))
        return out

    assert advantages(off) == advantages(on)


def test_tags_stay_with_their_keys_on_every_rank() -> None:
    """D8: lengths [9,1,8,2,7,3,6,4] on two ranks; whatever the place, tokens are those of that key."""
    lengths = named([9, 1, 8, 2, 7, 3, 6, 4])
    costs = {key: 100.0 + n for key, n in lengths.items()}
    plan = plan_batch(lengths, ranks=2, budget_tokens=10, cost=costs)
    assert plan.keys == frozenset(lengths)
    for rank in plan.ranks:
        for batch in rank:
            assert batch.tokens == sum(lengths[key] for key in batch.keys)
            assert batch.cost == sum(costs[key] for key in batch.keys)


def test_micro_batches_go_costliest_first_or_cheapest_at_both_ends() -> None:
    lengths = named([40, 35, 30, 25, 26, 27])
    first = plan_batch(lengths, ranks=1, budget_tokens=40)
    assert [batch.tokens for batch in first.ranks[0]] == sorted((b.tokens for b in first.ranks[0]), reverse=True)
    ends = [b.tokens for b in plan_batch(lengths, ranks=1, budget_tokens=40, order="cheap_ends").ranks[0]]
    assert sorted(ends) == sorted(lengths.values())
    peak = ends.index(max(ends))
    assert ends[: peak + 1] == sorted(ends[: peak + 1])
    assert ends[peak:] == sorted(ends[peak:], reverse=True)
    assert 0 < peak < len(ends) - 1


@pytest.mark.parametrize("name", ["ranks", "budget_tokens", "align", "updates"])
def test_options_out_of_range_are_named(name: str) -> None:
    options: dict[str, Any] = {"ranks": 1, "budget_tokens": 8, name: 0}
    with pytest.raises(ValueError, match=rf"{name} is 0; it must be at least 1"):
        plan_batch({"v0_p0_g0": 4}, **options)
    with pytest.raises(ValueError, match="order is 'any'; it must be one of costliest_first, cheap_ends"):
        plan_batch({"v0_p0_g0": 4}, ranks=1, budget_tokens=8, order="any")  # type: ignore[arg-type]


def test_forward_only_ranks_keep_groups_together() -> None:
    """Eight groups of equal samples on four ranks: none is split, whatever its names' order."""
    lengths = named([10] * 32)
    names = {key: f"group {n % 8}" for n, key in enumerate(random.Random(1).sample(sorted(lengths), 32))}
    plan = plan_batch(lengths, ranks=4, budget_tokens=40, groups=names, forward_only=True)
    assert len({(rank, names[key]) for rank, hand in enumerate(plan.ranks) for b in hand for key in b.keys}) == 8


@pytest.mark.parametrize("forward_only", [False, True])
def test_keeping_groups_together_does_not_depend_on_arrival(forward_only: bool) -> None:
    rng = random.Random(4)
    lengths = named([rng.randint(1, BUDGET) for _ in range(60)])
    items = list(lengths.items())
    plans = []
    for _ in range(3):
        groups = {key: group_of(key) for key, _ in items}
        plans.append(plan_batch(dict(items), ranks=3, budget_tokens=BUDGET, groups=groups, forward_only=forward_only))
        rng.shuffle(items)
    assert plans[0] == plans[1] == plans[2]


def test_the_cost_is_of_padded_tokens() -> None:
    asked: list[list[int]] = []

    def cost(tokens: Ints) -> Floats:
        asked.append(tokens.tolist())
        return tokens.astype(np.float64)

    plan_batch({"v0_p0_g0": 3, "v0_p0_g1": 8, "v0_p0_g2": 9}, ranks=1, budget_tokens=32, align=8, cost=cost)
    assert asked == [[8, 8, 16]]
