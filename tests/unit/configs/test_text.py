"""YAML as users write it, and what of it is refused."""

from typing import Any

import pytest
import yaml

from asyncrl.configs.text import read_yaml


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: {{ seed }}", "line 1, column 8: a map or list as a key"),
        ("a: 1\n? [1, 2]\n: 3", "line 2, column 3: a map or list as a key"),
        ("[" * 400, "line 1, column 101: more than 100 levels deep"),
        ("a:\n  b: " + "{x: " * 400, "line 2, column 395: more than 100 levels deep"),
        ("a: &x [*x]", "line 1, column 8: *x contains itself"),
        ("a: b\n c: \x00", "line 2, column 5: the character #x00 is not allowed"),
        ("\ud800", "line 1, column 1: the character #xd800 is not allowed"),
        ("a: 1\n\na: 2", "line 1, column 1: key 'a' occurs twice"),
        ("a: 'x", "line 1, column 6: while scanning"),
        ("!!int x", "line 1, column 1: invalid literal"),
        ("a: 0b_", "line 1, column 4: invalid literal"),
        ("a: " + "9" * 5000, "line 1, column 4: Exceeds the limit"),
        ("!!set {a}", "line 1, column 1: could not determine a constructor"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_place(text: str, says: str) -> None:
    """FOUND-I7: on one line, whatever is wrong."""
    with pytest.raises(yaml.YAMLError) as caught:
        read_yaml(text)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["010", "-010", "00", "1:30", "1:30.5"])
def test_a_number_of_base_8_or_60_is_refused(text: str) -> None:
    """FOUND-I8: YAML 1.1 reads 010 as 8; its users do not."""
    with pytest.raises(yaml.YAMLError, match=f"{text} is a number of base 8 or 60"):
        read_yaml(f"a: {text}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-0", 0), ("0x10", 16), ("1_000", 1000), ("0.5", 0.5), ("1e-3", 1e-3), ("'010'", "010")],
)
def test_other_numbers_are_what_they_look_like(text: str, value: Any) -> None:
    assert read_yaml(text) == value


def test_a_date_is_the_text_that_it_is() -> None:
    """FOUND-I8: the event log, which is JSON, knows no dates, and a replay would give a filter another value."""
    assert read_yaml("since: 2026-11-28") == {"since": "2026-11-28"}
