"""Which version made which tokens: written, read, and counted against a bound."""

import pytest

from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.spans import (
    mean_token_ages,
    read_spans,
    sample_spans,
    tokens_by_version,
    withheld_tokens,
    write_spans,
)


@pytest.mark.parametrize("spans", [[], [(3, 0, 5)], [(3, 0, 2), (5, 2, 9)]])
def test_spans_are_read_as_they_were_written(spans: list[tuple[int, int, int]]) -> None:
    tokens = spans[-1][2] if spans else 0
    assert read_spans(write_spans(spans), tokens) == spans


def test_tokens_from_before_the_oldest_version_allowed_are_counted_and_aged() -> None:
    tags = {"group": 0, "version": 3, "response_tokens": [9, 4, 0], "spans": ["3:0,5:2", "4:0", ""]}
    group = GroupMeta(sample_keys(3, 0, 3), tags)
    assert sample_spans(group) == [[(3, 0, 2), (5, 2, 9)], [(4, 0, 4)], []]
    assert withheld_tokens(group, 4) == [2, 0, 0]
    assert withheld_tokens(group, 6) == [9, 4, 0]
    assert mean_token_ages(group, 6) == [(3 * 2 + 1 * 7) / 9, 2.0, 0.0]


def test_without_spans_all_tokens_are_of_the_groups_version() -> None:
    group = GroupMeta(sample_keys(3, 0, 1), {"group": 0, "version": 3, "response_tokens": [4]})
    assert sample_spans(group) == [[(3, 0, 4)]]


def test_tokens_that_were_not_generated_have_a_version_and_no_age() -> None:
    """A tool's output of 3 tokens behind the first 2: of the 6 generated ones 2 are of version 3."""
    tags = {"group": 0, "version": 3, "response_tokens": [9], "spans": ["3:0,5:5"], "generated": ["0:2,5:9"]}
    group = GroupMeta(sample_keys(3, 0, 1), tags)
    assert withheld_tokens(group, 4) == [5]
    assert mean_token_ages(group, 6) == [(3 * 2 + 1 * 4) / 6]
    assert tokens_by_version(group) == {3: 2, 5: 4}
