"""What Mooncake answers to the reads of several rows, one code each."""

import pytest

from asyncrl.engine.data_plane.mooncake import check_read
from asyncrl.engine.errors import DataPlaneError, MissingRows

ROWS = ["row-0", "row-1", "row-2", "row-3"]


def test_an_error_for_one_row_of_four_names_it_before_a_byte_is_used() -> None:
    """CASE-E11: a buffer that was not filled would be trained on."""
    with pytest.raises(DataPlaneError, match="could not read the row row-2: error -800"):
        check_read(ROWS, [64, 64, -800, 64])


def test_a_row_that_was_cleared_meanwhile_is_missing_by_name() -> None:
    with pytest.raises(MissingRows, match="the row row-1 was cleared"):
        check_read(ROWS, [64, -704, 64, 64])


def test_sizes_are_no_errors() -> None:
    check_read(ROWS, [64, 0, 1, 1 << 40])
