import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.loop.claim_gate import can_claim_without_expiring as can_claim

VERSIONS = st.lists(st.integers(0, 4), max_size=12)


@pytest.mark.parametrize(
    ("arrived", "in_flight", "verdict"),
    [
        ([3, 3], [], True),
        ([3, 3], [3, 3], True),
        # The next batch, of version 5, has room for two of version 3.
        ([4, 4], [3, 3], True),
        ([4, 4], [3, 3, 3], False),
        ([3, 4, 4], [3, 3], True),
        # Two batches have no room for five.
        ([3, 4, 4, 4, 4], [3, 3], False),
        ([3, 3, 3], [2, 3], False),
        # Too old for the next batch: this one has to take it.
        ([4, 4], [2], False),
        # The oldest are all there, so waiting helps nothing.
        ([2, 2, 2], [2, 3], True),
        # Fewer there than wanted.
        ([2], [2], False),
        ([2], [3, 4], True),
    ],
)
def test_a_batch_of_two_at_version_4_and_bound_2(arrived: list[int], in_flight: list[int], verdict: bool) -> None:
    assert can_claim(arrived=arrived, in_flight=in_flight, wanted=2, per_batch=2, at=4, bound=2) is verdict


@settings(deadline=None, max_examples=60)
@given(VERSIONS, VERSIONS, st.integers(1, 3), st.integers(0, 3))
def test_it_passes_when_what_is_left_fits_or_waiting_changes_nothing(
    arrived: list[int], in_flight: list[int], per_batch: int, bound: int
) -> None:
    """Against batches filled one after the other, oldest first."""
    at = 4
    taken, left = sorted(arrived)[:per_batch], sorted([*sorted(arrived)[per_batch:], *in_flight])
    batches = [left[i : i + per_batch] for i in range(0, len(left), per_batch)]
    fits = all(at + 1 + n - version <= bound for n, batch in enumerate(batches) for version in batch)
    best = sorted([*arrived, *in_flight])[:per_batch]
    changes = not in_flight or taken == best
    assert can_claim(
        arrived=arrived, in_flight=in_flight, wanted=per_batch, per_batch=per_batch, at=at, bound=bound
    ) is (fits or changes)
