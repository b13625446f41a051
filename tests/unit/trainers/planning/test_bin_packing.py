"""Bins: never over the capacity or empty, as few as hold the sizes, and a bound that no packing is below."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.planning.bin_packing import (
    _fill_empty,
    _fit,
    _repack,
    lower_bound,
    pack,
    pack_by_owner,
    pack_into,
)
from asyncrl.trainers.planning.subset_sums import fill_bins

some_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=30)


def descending(sizes: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(sorted(sizes, reverse=True), np.int64)


def brute_least(sizes: list[int], capacity: int) -> int:
    for count in range(1, len(sizes) + 1):
        for where in itertools.product(range(count), repeat=len(sizes)):
            if all(sum(n for n, at in zip(sizes, where, strict=True) if at == b) <= capacity for b in range(count)):
                return count
    raise AssertionError("one is over the capacity")


def threshold_bound(sizes: list[int], capacity: int) -> int:
    """Martello and Toth's L2 as it is written, threshold by threshold."""
    found = max(1, -(-sum(sizes) // capacity))
    for least in {0, *(n for n in sizes if n <= capacity // 2)}:
        alone = [n for n in sizes if n > capacity - least]
        halves = [n for n in sizes if capacity - least >= n > capacity / 2]
        small = sum(n for n in sizes if least <= n <= capacity / 2)
        rest = -(-(small - (len(halves) * capacity - sum(halves))) // capacity)
        found = max(found, len(alone) + len(halves) + max(0, rest))
    return found


@settings(deadline=None, max_examples=60)
@given(some_sizes, st.integers(30, 61))
def test_the_bound_is_that_of_the_book(sizes: list[int], capacity: int) -> None:
    assert lower_bound(descending(sizes), capacity=capacity) == threshold_bound(sizes, capacity)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=5), st.integers(10, 14))
def test_no_packing_is_below_the_bound(sizes: list[int], capacity: int) -> None:
    assert lower_bound(descending(sizes), capacity=capacity) <= brute_least(sizes, capacity)


def test_the_bound_sees_large_samples_that_share_no_bin() -> None:
    """Three of 6 and two of 5 in bins of 10: 28 tokens, and yet four bins."""
    assert lower_bound(descending([6, 6, 6, 5, 5]), capacity=10) == 4


@settings(deadline=None, max_examples=60)
@given(some_sizes, st.integers(30, 61), st.integers(1, 5))
def test_no_bin_is_over_the_capacity_or_empty(sizes: list[int], capacity: int, multiple: int) -> None:
    bins, count = pack(descending(sizes), capacity=capacity, multiple=multiple)
    assert count % multiple == 0
    assert np.bincount(bins, weights=descending(sizes), minlength=count).max() <= capacity
    assert len(set(bins.tolist())) == min(count, len(sizes))


def test_more_than_the_bins_hold_is_no_packing() -> None:
    assert pack_into(descending([5, 5, 5]), 1, capacity=10) is None
    assert pack_into(descending([6, 6, 6]), 2, capacity=10) is None


def test_empty_bins_get_the_smallest_of_the_fullest() -> None:
    """Sizes descend, so a bin's last sample is its smallest; bins 1 and 3 are empty, bin 0 and then 2 the fullest."""
    assert _fill_empty(np.array([0, 2, 0, 2, 0, 2]), 4).tolist() == [0, 2, 0, 2, 1, 3]
    assert _fill_empty(np.array([1, 0]), 2).tolist() == [1, 0]
    with pytest.raises(AssertionError):
        assert _fill_empty(np.array([0, 0, 0]), 3).tolist() == [0, 0, 0]


def test_bins_are_filled_to_the_last_token_where_fits_leave_gaps() -> None:
    """60 = 44+8+8 = 24+22+8+6 = 24+21+9+6; longest first, worst or best fit, wants a fourth bin."""
    sizes = [44, 24, 24, 22, 21, 9, 8, 8, 8, 6, 6]
    bins = fill_bins(sizes, 3, capacity=60)
    assert np.bincount(bins, weights=sizes).tolist() == [60, 60, 60]


def test_what_no_bin_has_room_for_is_marked() -> None:
    assert sorted(fill_bins([6, 6, 6], 2, capacity=10).tolist()) == [-1, 0, 1]


def test_samples_stay_in_their_owners_bins_while_these_have_room() -> None:
    """Owner 1 has 5, 4, 3 and 2 for two bins of 6: the 3 goes to owner 0, who has room beside its own 3."""
    sizes, owner = descending([6, 5, 4, 3, 3, 2]), np.array([0, 1, 1, 0, 1, 1])
    bins = pack_by_owner(sizes, owner, ranks=2, per_rank=2, capacity=6)
    assert bins is not None
    assert np.bincount(bins, weights=sizes, minlength=4).max() <= 6
    moved = np.flatnonzero(bins // 2 != owner)
    assert sizes[moved].tolist() == [3]


def test_owners_that_fill_all_bins_are_packed_to_the_last_token() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.multinomial(100 - 8, [1 / 8] * 8) + 1 for _ in range(12)]
    sizes, owner = np.concatenate(parts), np.repeat(np.arange(12) // 3, 8)
    order = np.argsort(-sizes, kind="stable")
    bins = pack_by_owner(sizes[order], owner[order], ranks=4, per_rank=3, capacity=100)
    assert bins is not None
    assert np.bincount(bins, weights=sizes[order]).tolist() == [100] * 12


def test_what_is_left_over_is_placed_by_filling_the_roomiest_bins_anew() -> None:
    """0.99995 of the room: one in sixteen bins is filled anew, the others stay."""
    sizes = descending(np.random.default_rng(15).lognormal(7.5, 1.0, 16_384).astype(np.int64).clip(1, 16_384).tolist())
    count = 16 * -(-int(sizes.sum()) // 16_384 // 16)
    fitted = _fit(sizes, count, capacity=16_384, levelled=len(sizes) * 6 // 10)
    assert fitted is not None
    assert (fitted < 0).sum() > 20
    bins = _repack(sizes, fitted, count, capacity=16_384)
    assert (bins >= 0).all()
    assert np.bincount(bins, weights=sizes).max() <= 16_384
    assert len(set(fitted[bins != fitted].tolist()) - {-1}) <= count // 16
