"""Sample keys: minted once, told apart by version, dispatch number and index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.records.keys import group_row, is_sample_key, row_of, sample_keys

NUMBERS = st.integers(0, 10**6)


def test_a_key_is_written_as_the_page_says() -> None:
    assert sample_keys(3, 17, 2) == ("v3_p17_g0", "v3_p17_g1")


@given(version=NUMBERS, group=NUMBERS, size=st.integers(1, 20))
def test_every_key_leads_to_its_row(version: int, group: int, size: int) -> None:
    keys = sample_keys(version, group, size)
    assert len(set(keys)) == size
    assert {row_of(key) for key in keys} == {group_row(version, group)}


@given(st.sets(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=20))
def test_groups_never_share_a_key(groups: set[tuple[int, int]]) -> None:
    """E10: epochs, retries and collectors have dispatch numbers of their own."""
    keys = [key for version, group in groups for key in sample_keys(version, group, 3)]
    assert len(set(keys)) == 3 * len(groups)


@pytest.mark.parametrize(
    "text", ["", "v1_p2", "v1_p2_g", "v1_p2_g3_g4", "v-1_p2_g3", "x_v1_p2_g3", "v1_p2_g3\n", "v1_p2#a#b"]
)
def test_what_is_no_sample_key_has_no_row(text: str) -> None:
    assert not is_sample_key(text)
    with pytest.raises(ValueError, match="not a sample key"):
        row_of(text)
