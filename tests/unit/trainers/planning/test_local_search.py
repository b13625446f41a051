"""Swaps between ranks: they keep budgets and bins, never make it worse, and leave nothing empty."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.planning.local_search import swap_bins, swap_freely, swap_samples, target_load
from asyncrl.trainers.planning.longest_first import assign
from asyncrl.trainers.planning.samples import Floats, Ints, Layout, Samples, loads_of, stable_order


def samples_of(sizes: Ints, costs: Floats) -> Samples:
    keys = np.array([f"k{i}" for i in range(len(sizes))], dtype=object)
    return Samples(keys, sizes, sizes, costs)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=6, max_size=40), st.integers(2, 3), st.integers(0, 30), st.integers(1, 3))
def test_swaps_keep_budgets_and_bins_and_never_make_it_worse(
    sizes: list[int], ranks: int, spare: int, per_bin: int
) -> None:
    each = max(1, len(sizes) // (per_bin * ranks))
    size, costs = np.array(sizes), np.array(sizes) ** 1.5
    bins, rank = np.arange(len(sizes)) % (each * ranks), np.arange(each * ranks) % ranks
    capacity = int(np.bincount(bins, weights=size).max()) + spare
    before = loads_of(rank[bins], costs, count=ranks).max()
    found = swap_samples(Layout(bins, rank), samples_of(size, costs), ranks=ranks, capacity=capacity).bins
    assert bins.tolist() == (np.arange(len(sizes)) % (each * ranks)).tolist()
    assert np.bincount(found, weights=size).max() <= capacity
    assert len(set(found.tolist())) == len(set(bins.tolist()))
    assert loads_of(rank[found], costs, count=ranks).max() <= before * (1 + 1e-12)


def test_the_one_swap_that_evens_two_ranks_is_found() -> None:
    """Ranks of 30 and 20 in full bins: 12 against 7 makes both 25."""
    costs = np.array([18.0, 12.0, 13.0, 7.0])
    rank = np.array([0, 0, 1, 1])
    found = swap_samples(Layout(np.arange(4), rank), samples_of(costs.astype(np.int64), costs), ranks=2, capacity=18)
    assert loads_of(rank[found.bins], costs, count=2).tolist() == [25, 25]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_many_samples_are_even(seed: int) -> None:
    """160 samples on 8 ranks: the heaviest is within a thousandth of the mean."""
    costs = np.random.default_rng(seed).integers(1, 5000, 160).astype(np.float64)
    rank = swap_freely(assign(costs, ranks=8), costs, count=8)
    assert loads_of(rank, costs, count=8).max() <= 1.001 * costs.sum() / 8


def test_a_small_costly_sample_is_not_swapped_for_a_large_cheap_one_that_its_bin_does_not_hold() -> None:
    """Full bins of 9, loads 6 and 2: every swap that evens them puts one of the bins over."""
    layout = Layout(np.array([0, 0, 1, 1]), np.array([0, 1]))
    samples = samples_of(np.array([4, 5, 6, 3]), np.array([3.0, 3.0, 1.0, 1.0]))
    found = swap_samples(layout, samples, ranks=2, capacity=9).bins
    assert np.bincount(found, weights=samples.sizes).tolist() == [9, 9]


def test_whole_bins_are_swapped_between_ranks() -> None:
    """Longest first gives 8, 5 and 4 (17) against 7, 6 and 3 (16); swaps must not make that worse, or counts differ."""
    costs = np.array([8.0, 7, 6, 5, 4, 3])
    rank = swap_bins(assign(costs, ranks=2), costs, ranks=2)
    assert np.bincount(rank).tolist() == [3, 3]
    assert loads_of(rank, costs, count=2).max() == 17


def test_moves_leave_no_bin_empty() -> None:
    """The heavy rank has 30 too much and room to spare; the light one's only sample in a bin must stay there."""
    costs = np.array([50.0, 20.0, 10.0, 5.0])
    bins, rank = np.array([0, 0, 1, 2]), np.array([0, 0, 1, 1])
    found = swap_samples(Layout(bins, rank), samples_of(costs.astype(np.int64), costs), ranks=2, capacity=100)
    assert set(found.bins.tolist()) >= {0, 1, 2}


def test_a_load_that_one_sample_forces_is_enough() -> None:
    """9, 1, 1, 1 on two ranks of two: the rank of the 9 has 10, however the others go."""
    assert target_load(np.array([9.0, 1, 1, 1]), ranks=2, per_rank=2) == 10
    assert target_load(np.array([5.0, 5, 5, 5]), ranks=2, per_rank=2) == pytest.approx(10, rel=2e-5)


def test_numbers_of_any_size_are_put_in_order() -> None:
    numbers = np.array([65_537, 1, 65_536, 0, 1])
    assert stable_order(numbers).tolist() == [3, 1, 4, 2, 0]
    assert stable_order(numbers[1:][[0, 2, 3]]).tolist() == [1, 0, 2]
    assert stable_order(numbers[:0]).tolist() == []
