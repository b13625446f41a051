"""A group's tags: read by name, per sample or for the group, and never guessed."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engine.errors import TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import check_tags, is_live_reward
from asyncrl.engine.records.keys import sample_keys

MISSING = object()


def group(**tags: Any) -> GroupMeta:
    full = {"version": 3, "group": 5, "prompt": 2, "reward": [0.0, 1.0], **tags}
    return GroupMeta(sample_keys(3, 5, 2), {name: value for name, value in full.items() if value is not MISSING})


@pytest.mark.parametrize(
    "value", [MISSING, None, 3.0, math.nan, True, np.float64(3), np.True_, "3", [3, 3], torch.ones(2)]
)
def test_a_version_that_is_no_integer_is_refused(value: Any) -> None:
    """CASE-A3: a group without a version is never taken for age 0."""
    with pytest.raises(TagError, match=r"v3_p5_g0.*'version'"):
        group(version=value).age(3)


@pytest.mark.parametrize("value", [3, np.int64(3), np.int8(3), np.uint32(3)])
def test_numpy_integers_are_versions(value: Any) -> None:
    meta = group(version=value)
    assert (meta.version, meta.age(5)) == (3, 2)
    assert type(meta.version) is int


@pytest.mark.parametrize("tag", ["group", "prompt", "version"])
def test_each_integer_tag_is_checked(tag: str) -> None:
    with pytest.raises(TagError, match=f"'{tag}'"):
        getattr(group(**{tag: 1.5}), tag)


def test_age_counts_versions_and_is_never_negative() -> None:
    """CASE-A1, CASE-A5: V minus the version at 0, 1 and 2; a stamp from the future is an error."""
    assert [group(version=version).age(5) for version in (5, 4, 3)] == [0, 1, 2]
    with pytest.raises(TagError, match=r"version 6.*5"):
        group(version=6).age(5)


def test_a_missing_tag_is_named_with_its_key_and_what_there_is() -> None:
    with pytest.raises(TagError, match=r"v3_p5_g0: tag 'status' is missing.*'reward'"):
        _ = group().statuses
    with pytest.raises(TagError, match=r"'reward'.*not a list"):
        _ = group(reward=1.0).rewards


def test_tags_and_samples_that_disagree_in_number_are_refused() -> None:
    with pytest.raises(TagError, match=r"'reward' has 3 values for 2 samples"):
        group(reward=[1, 2, 3])
    with pytest.raises(TagError, match=r"'reward' has 1 values for 2 samples"):
        group().stamp(reward=(1,))
    with pytest.raises(TagError, match="no keys"):
        GroupMeta((), {})


def test_stamping_leaves_the_original() -> None:
    meta = group()
    assert meta.stamp(advantage=[0.5, -0.5]).sample_tag("advantage") == (0.5, -0.5)
    assert "advantage" not in meta.tags


@pytest.mark.parametrize(
    "value", [1, -1.5, math.nan, math.inf, "text", True, None, [1, None], ("a", "b"), [], [math.nan, 1]], ids=repr
)
def test_plain_values_are_tags(value: Any) -> None:
    check_tags({"tag": value}, key="k")


@pytest.mark.parametrize(
    "value",
    [{}, b"", {1}, 1j, object(), [[1]], [{}], np.int64(1), np.float64(1), [np.float32(1)], np.ones(2), torch.ones(1)],
    ids=lambda value: type(value).__name__,
)
def test_what_no_log_can_write_is_no_tag(value: Any) -> None:
    with pytest.raises(TagError, match=r"k: tag 'odd'"):
        check_tags({"good": 1, "odd": value}, key="k")


@pytest.mark.parametrize(
    ("reward", "live"),
    [(0.0, True), (-1, True), (None, False), (math.nan, False), (math.inf, False), (-math.inf, False)],
)
def test_a_live_reward_is_present_and_finite(reward: float | None, live: bool) -> None:
    assert is_live_reward(reward) is live
