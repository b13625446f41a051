"""BatchMeta's transforms: tags and lengths stay with their keys, and every answer is fresh."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.errors import TagError
from asyncrl.engine.records import BatchMeta


def batch(*numbers: int, **changes: Any) -> BatchMeta:
    """Build rows whose length and tag follow from the key."""
    fields: dict[str, Any] = {
        "partition": "train",
        "keys": tuple(f"k{n}" for n in numbers),
        "lengths": tuple(10 * n for n in numbers),
        "tags": tuple({"n": n, "list": [n]} for n in numbers),
        "consumer": "trainer",
        "columns": ("tokens",),
        "bag": {"notes": ["bag"]},
    }
    return BatchMeta(**{**fields, **changes})


TRANSFORMS: dict[str, tuple[Callable[[BatchMeta], BatchMeta], tuple[int, ...]]] = {
    "subset": (lambda b: b.subset(["k3", "k1"]), (3, 1)),
    "slice": (lambda b: b.slice(1, 3), (2, 3)),
    "slice beyond": (lambda b: b.slice(2, 99), (3,)),
    "slice from the end": (lambda b: b.slice(-2, 3), (2, 3)),
    "drop": (lambda b: b.drop(["k2"]), (1, 3)),
    "drop nothing": (lambda b: b.drop([]), (1, 2, 3)),
    "concat": (lambda b: BatchMeta.concat([b, batch(7)]), (1, 2, 3, 7)),
    "stamp": (lambda b: b.stamp("n", [1, 2, 3]), (1, 2, 3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_threads_lengths_and_tags_with_the_keys(name: str) -> None:
    transform, numbers = TRANSFORMS[name]
    assert transform(batch(1, 2, 3)) == batch(*numbers)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_fresh_containers(name: str) -> None:
    original = batch(1, 2, 3)
    fresh = TRANSFORMS[name][0](original)
    for row in fresh.tags:
        row["list"].append("changed")
        dict(row)["n"] = "changed"
    fresh.bag["notes"].append("changed")
    assert original == batch(1, 2, 3)


def test_stamping_adds_a_tag_a_row_and_leaves_the_original() -> None:
    original = batch(1, 2)
    stamped = original.stamp("advantage", [0.5, -0.5])
    assert [row["advantage"] for row in stamped.tags] == [0.5, -0.5]
    assert original == batch(1, 2)


def test_joining_takes_the_later_bag() -> None:
    joined = BatchMeta.concat([batch(1, bag={"a": 1, "b": 1}), batch(2, bag={"b": 2})])
    assert joined.bag == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: batch(1, 2).subset(["k1", "k9"]), "k9"),
        (lambda: batch(1, 2).drop(["k9"]), "k9"),
        (lambda: batch(1, 2).subset(["k1", "k1"]), "twice"),
        (lambda: batch(1, 1), "twice"),
        (lambda: BatchMeta.concat([batch(1), batch(1)]), "twice"),
        (lambda: BatchMeta.concat([]), "nothing"),
        (lambda: BatchMeta.concat([batch(1), batch(2, partition="eval")]), "eval"),
        (lambda: BatchMeta.concat([batch(1), batch(2, consumer="other")]), "other"),
        (lambda: BatchMeta.concat([batch(1), batch(2, columns=("logprobs",))]), "logprobs"),
        (lambda: batch(1, 2).stamp("x", [1]), "1 values.*2 keys"),
        (lambda: batch(1, 2).stamp("x", [1, 2, 3]), "3 values.*2 keys"),
        (lambda: batch(1, 2, lengths=(1,)), "1 lengths"),
        (lambda: batch(1, 2, tags=({},)), "1 tags"),
    ],
)
def test_a_transform_that_cannot_be_whole_is_an_error(act: Callable[[], BatchMeta], named: str) -> None:
    with pytest.raises(TagError, match=named):
        act()


@given(numbers=st.sets(st.integers(0, 30)), chosen=st.sets(st.integers(0, 30)))
@settings(deadline=None, max_examples=50)
def test_subset_and_drop_are_complements(numbers: set[int], chosen: set[int]) -> None:
    whole = batch(*sorted(numbers))
    keys = [f"k{n}" for n in sorted(chosen & numbers)]
    parts = [whole.subset(keys), whole.drop(keys)]
    assert sorted(BatchMeta.concat(parts).keys) == sorted(whole.keys)
    assert parts[0] == batch(*sorted(chosen & numbers))
    assert parts[1] == batch(*sorted(numbers - chosen))
