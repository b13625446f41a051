"""Places of generated tokens: written, read, counted, and refused where they fit no response."""

import pytest

from asyncrl.engine.records.generated import count_generated, read_generated, write_generated


@pytest.mark.parametrize("places", [((0, 12), (20, 31)), ((3, 5),)])
def test_places_are_read_as_they_were_written(places: tuple[tuple[int, int], ...]) -> None:
    assert read_generated(write_generated(places), 40) == places


def test_without_a_text_all_was_generated_and_without_a_place_nothing() -> None:
    assert read_generated("", 7) == ((0, 7),)
    assert count_generated(read_generated(write_generated(()), 7), 0, 7) == 0


def test_generated_tokens_are_counted_from_any_place() -> None:
    places = read_generated("0:12,20:31", 33)
    assert [count_generated(places, first, 33) for first in (0, 12, 25, 31)] == [23, 11, 6, 0]


@pytest.mark.parametrize("text", ["0:8", "3:2", "4:5,1:2", "0:4,3:5", "x", "1"])
def test_places_that_fit_no_response_of_seven_tokens_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"generated|invalid literal"):
        read_generated(text, 7)
