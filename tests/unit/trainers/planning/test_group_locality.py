"""Groups on one rank: at most one group fewer than the ranks is split, and costs are even."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.fan_out import plan_batch
from asyncrl.trainers.planning.group_locality import assign_groups
from asyncrl.trainers.planning.samples import Floats, Ints, Samples, loads_of


def assigned(group: Ints, *, sizes: Ints, costs: Floats, ranks: int) -> Ints:
    keys = np.array([f"v0_p{i}_g0" for i in range(len(sizes))], dtype=object)
    return assign_groups(Samples(keys, sizes, sizes, costs), group, ranks=ranks)


def splits(group: np.ndarray[tuple[int], np.dtype[np.int64]], rank: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Count the reads of groups beyond one each."""
    return len(set(zip(group.tolist(), rank.tolist(), strict=True))) - len(set(group.tolist()))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 9))
def test_groups_are_cut_as_rarely_as_ranks_meet(lengths: list[int], size: int, ranks: int) -> None:
    sizes = np.array(lengths)
    group = np.arange(len(lengths)) // size
    rank = assigned(group, sizes=sizes, costs=sizes * 1.0, ranks=ranks)
    assert rank.min() >= 0
    assert rank.max() < ranks
    assert splits(group, rank) <= ranks - 1
    loads = loads_of(rank, sizes * 1.0, count=ranks)
    assert loads.max() <= sizes.sum() / ranks + sizes.max()


def test_cuts_go_through_the_subset_that_is_closest() -> None:
    """One group of 9, 5, 4, 2 on two ranks: 9 + ... of 20 is cut at 10, which no prefix of it is but 5 + 4 is near."""
    costs = np.array([9.0, 5.0, 4.0, 2.0])
    rank = assigned(np.zeros(4, np.int64), sizes=costs.astype(np.int64), costs=costs, ranks=2)
    assert sorted(loads_of(rank, costs, count=2).tolist()) == [9, 11]


def test_ranks_of_like_cost_hold_like_tokens() -> None:
    """Groups differ in cost per token; groups laid as they come would leave 4% of tokens uneven."""
    sizes = np.random.default_rng(2).lognormal(7, 1, 4096).astype(np.int64).clip(1, 8000)
    group, costs = np.arange(len(sizes)) // 8, sizes * 1.0 + sizes**2 / 4000
    rank = assigned(group, sizes=sizes, costs=costs, ranks=8)
    for of in (sizes * 1.0, costs):
        loads = loads_of(rank, of, count=8)
        assert loads.max() <= 1.004 * loads.mean()


def test_nothing_depends_on_the_numbers_of_groups() -> None:
    rng = np.random.default_rng(3)
    sizes, group = rng.integers(1, 500, 96), np.arange(96) // 6
    renamed, costs = rng.permutation(16)[group], sizes.astype(np.float64)
    one = assigned(group, sizes=sizes, costs=costs, ranks=4)
    assert assigned(renamed, sizes=sizes, costs=costs, ranks=4).tolist() == one.tolist()


def test_groups_stay_together_where_one_sample_makes_the_heaviest_rank() -> None:
    """No plan is lighter than that sample, so keeping groups together costs nothing."""
    lengths = {"v0_p0_g0": 900} | {f"v0_p{p}_g{i}": 10 + 7 * i + p for p in range(1, 9) for i in range(4)}
    groups = {key: key.rpartition("_")[0] for key in lengths}
    reads, heaviest = [], []
    for some in (None, groups):
        plan = plan_batch(lengths, ranks=4, budget_tokens=900, groups=some)
        reads.append(len({(r, groups[key]) for r, hand in enumerate(plan.ranks) for b in hand for key in b.keys}))
        heaviest.append(max(sum(b.tokens for b in hand) for hand in plan.ranks))
    assert heaviest == [900, 900]
    assert reads[1] < reads[0]


@pytest.mark.parametrize(("seed", "each"), [(0, 1.01), (15, 1.02)])
def test_16384_samples_are_packed_to_the_bound_with_their_groups_together(seed: int, each: float) -> None:
    """Seed 15 leaves one token of room a micro-batch. Without locality a group is read by 6.4 of the 16 ranks."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.0, 16_384)
    lengths = {f"v0_p{i // 8}_g{i % 8}": min(16_384, max(1, int(n))) for i, n in enumerate(drawn)}
    plan = plan_batch(lengths, ranks=16, budget_tokens=16_384, groups={key: key.rpartition("_")[0] for key in lengths})
    assert len(plan.ranks[0]) == -(-sum(lengths.values()) // 16_384 // 16)
    loads = [sum(batch.tokens for batch in rank) for rank in plan.ranks]
    assert max(loads) * 16 / sum(loads) <= 1.0005
    reads = {(rank, key.rpartition("_")[0]) for rank, hand in enumerate(plan.ranks) for b in hand for key in b.keys}
    assert len(reads) <= each * 2048
