"""Swaps of samples between ranks: one at a time, two at a time, and whole deals of the samples of two ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.dealing import attainable, deal_samples, swap_freely, swap_samples, totals
from asyncrl.trainers.exchange import _fit_together
from asyncrl.trainers.repartition import subset_sums, subsets_near
from asyncrl.trainers.samples import Layout, Samples
from asyncrl.trainers.search import dealt_anew
from asyncrl.trainers.swaps import Things, ascending


def test_two_swaps_do_what_no_swap_does() -> None:
    """Ranks of 38 and 42 need 2: 13 for 12 and 7 for 6 move 1 each, and no swap or move is of 2, or of 1 or 3 more."""
    costs = np.array([12.0, 6.0, 20.0, 13.0, 7.0, 22.0])
    bins = np.arange(6)
    rank = np.array([0, 0, 0, 1, 1, 1])
    sizes = costs.astype(np.int64)
    found = swap_samples(bins, rank, sizes=sizes, costs=costs, capacity=22, ranks=2)
    assert totals(rank[found], costs, hands=2).tolist() == [40, 40]


def test_two_swaps_may_share_a_micro_batch_that_holds_them() -> None:
    """The same with one bin a rank: together they take from it what they bring."""
    costs = np.array([12.0, 6.0, 20.0, 13.0, 7.0, 22.0])
    bins, rank = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1])
    found = swap_samples(bins, rank, sizes=costs.astype(np.int64), costs=costs, capacity=42, ranks=2)
    assert totals(rank[found], costs, hands=2).tolist() == [40, 40]


def test_a_rank_passes_on_what_it_cannot_give_to_any_that_lacks_something() -> None:
    """Three ranks of 64, 64 and 63 exist; without passing on, 65 is left."""
    costs = np.array([20.0, 7, 26, 31, 10, 6, 5, 2, 26, 36, 19, 4])
    bins = np.arange(12)
    found = swap_samples(bins, bins % 3, sizes=costs.astype(np.int64), costs=costs, capacity=40, ranks=3)
    assert totals(found % 3, costs, hands=3).max() == 64


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=6, max_size=40), st.integers(2, 3), st.integers(0, 30), st.integers(1, 3))
def test_swaps_keep_budgets_and_bins_and_never_make_it_worse(
    sizes: list[int], ranks: int, spare: int, a_bin: int
) -> None:
    each = max(1, len(sizes) // (a_bin * ranks))
    size, costs = np.array(sizes), np.array(sizes) ** 1.5
    bins, rank = np.arange(len(sizes)) % (each * ranks), np.arange(each * ranks) % ranks
    capacity = int(np.bincount(bins, weights=size).max()) + spare
    before = totals(rank[bins], costs, hands=ranks).max()
    found = swap_samples(bins, rank, sizes=size, costs=costs, capacity=capacity, ranks=ranks, kicked=20)
    assert bins.tolist() == (np.arange(len(sizes)) % (each * ranks)).tolist()
    assert np.bincount(found, weights=size).max() <= capacity
    assert len(set(found.tolist())) == len(set(bins.tolist()))
    assert totals(rank[found], costs, hands=ranks).max() <= before * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_many_samples_are_even_to_the_last_token(seed: int) -> None:
    """Whole costs: the heaviest of 8 ranks is the mean, rounded up."""
    costs = np.random.default_rng(seed).integers(1, 5000, 160).astype(np.float64)
    rank = swap_freely(deal_samples(costs, 8), costs, hands=8)
    assert totals(rank, costs, hands=8).max() == np.ceil(costs.sum() / 8) == attainable(costs, ranks=8, each=1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 500), min_size=2, max_size=10), st.floats(0, 1))
def test_the_nearest_subsets_are_those_of_brute_force(costs: list[int], share: float) -> None:
    numbers, wanted = np.array(costs, np.float64), share * sum(costs)
    misses = np.sort(np.abs(subset_sums(numbers) - wanted))
    found = [abs(float(numbers[mask].sum()) - wanted) for mask in subsets_near(numbers, wanted, count=1)]
    assert found == pytest.approx([misses[0]])
    several = list(subsets_near(numbers, wanted, count=4))
    assert len({tuple(mask.tolist()) for mask in several}) == len(several)


def test_the_samples_of_two_ranks_are_dealt_anew_where_bins_allow_it() -> None:
    """Halves of 20: 8+7+5 and 6+6+4+4 need three samples swapped for four, in two bins of 12 a rank."""
    sizes = np.array([8, 7, 6, 6, 5, 4, 4])
    samples = Samples(np.array(list("abcdefg"), dtype=object), sizes, sizes, sizes.astype(np.float64))
    layout = Layout(np.array([0, 2, 0 + 1, 3, 2, 3, 1]), np.array([0, 0, 1, 1]))
    assert layout.heaviest(samples) == 22
    found = dealt_anew(layout, samples, ranks=2, capacity=12, enough=20.0)
    assert found.heaviest(samples) == 20
    assert np.bincount(found.bins, weights=sizes, minlength=4).max() <= 12
    assert len(set(found.bins.tolist())) == 4


def test_moves_leave_no_bin_empty() -> None:
    """The heavy rank has 30 too much and room to spare; the light one's only sample in a bin must stay there."""
    costs = np.array([50.0, 20.0, 10.0, 5.0])
    bins, rank = np.array([0, 0, 1, 2]), np.array([0, 0, 1, 1])
    found = swap_samples(bins, rank, sizes=costs.astype(np.int64), costs=costs, capacity=100, ranks=2, kicked=50)
    assert set(found.tolist()) >= {0, 1, 2}


def test_a_deal_leaves_no_micro_batch_without_a_sample() -> None:
    """9 against 3+3+3 would be even, but two micro-batches cannot share one sample."""
    sizes = np.array([9, 3, 3, 3])
    samples = Samples(np.array(list("abcd"), dtype=object), sizes, sizes, sizes.astype(np.float64))
    layout = Layout(np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1]))
    assert dealt_anew(layout, samples, ranks=2, capacity=12, enough=9.0).bins.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("x", "y", "together"),
    [
        ([0, 1], [3, 4], True),
        ([0, 0], [3, 4], False),
        ([0, 1], [3, 3], False),
        ([0, 1], [5, 2], False),
        ([0, 1], [8, 3], True),
        ([0, 1], [8, 8], False),
        ([0, 5], [3, 4], True),
    ],
)
def test_two_swaps_fit_together_if_they_share_nothing_and_bins_hold_both(
    x: list[int], y: list[int], together: bool
) -> None:
    """Bin 0: samples 0 and 1 of 4; bin 1: 2 to 5, of 4, 4, 4 and 9, with room for 5. 8 stands for bin 1's room."""
    size = np.array([4, 4, 4, 4, 4, 9, 1, 0, 0])
    home = np.array([0, 0, 1, 1, 1, 1, 2, 0, 1])
    things = Things(home, size.astype(np.float64), size, home, np.array([4, 5, 0]), np.array([2, 4, 1]), 7)
    assert _fit_together(things, np.array(x)[:, None], np.array(y)[:, None]).tolist() == [together]


def test_numbers_of_any_size_are_put_in_order() -> None:
    numbers = np.array([65_537, 1, 65_536, 0, 1])
    assert ascending(numbers).tolist() == [3, 1, 4, 2, 0]
    assert ascending(numbers[1:][[0, 2, 3]]).tolist() == [1, 0, 2]
    assert ascending(numbers[:0]).tolist() == []
