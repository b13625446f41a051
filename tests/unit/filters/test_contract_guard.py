"""A filter that breaks its contract, or lacks a tag, is named in the error; nothing is dropped by that."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.testing.fakes import fake_group
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Verdict, drop, keep, mask
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd

CONTEXT = FilterContext(trainer_version=5, step=5, seed=0)
GOOD = [0.0, 1.0]


class Custom(BaseRolloutFilter):
    """Judges with a function."""

    def __init__(self, verdict: Callable[[GroupView], Any]) -> None:
        self._verdict = verdict

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return cast("Verdict", self._verdict(group))


class Many(BaseRolloutFilter):
    """Judges several groups at once with a function."""

    def __init__(self, verdicts: Callable[[Sequence[GroupView]], Any]) -> None:
        self._verdicts = verdicts

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return keep()

    def judge_many(self, groups: Sequence[GroupView], context: FilterContext) -> list[Verdict]:
        return cast("list[Verdict]", self._verdicts(groups))


def run(filter_: BaseRolloutFilter, *groups: GroupMeta) -> list[str | None]:
    judged = Chain([filter_]).judge(groups or (fake_group(0, GOOD), fake_group(1, GOOD)), CONTEXT)
    return [judgement.dropped for judgement in judged]


def set_tag(group: GroupView) -> Verdict:
    cast("dict[str, Any]", group.meta.tags)["reward"] = [1.0, 1.0]
    return keep()


@pytest.mark.parametrize(
    ("filter_", "says"),
    [
        (Custom(set_tag), "filter Custom tried to change a tag"),
        (Many(lambda groups: [keep()]), "filter Many gave 1 verdicts for 2 groups"),
        (Many(lambda groups: [keep()] * 3), "filter Many gave 3 verdicts for 2 groups"),
        (Custom(lambda group: True), "filter Custom returned True for v0_p0"),
        (Custom(lambda group: None), "filter Custom returned None for v0_p0"),
        (Custom(lambda group: "stale"), "filter Custom returned 'stale'"),
        (Custom(lambda group: mask([2], "long", keep_reward=True)), r"filter Custom masked samples \(2,\)"),
        (Custom(lambda group: mask([-1], "long", keep_reward=True)), r"filter Custom masked samples \(-1,\)"),
        (
            Custom(lambda group: mask(cast("list[int]", ["0"]), "long", keep_reward=True)),
            r"filter Custom masked samples \('0',\)",
        ),
        (Custom(lambda group: drop("")), "filter Custom gave the reason '' to drop"),
        (Custom(lambda group: drop(cast("str", None))), "filter Custom gave the reason None to drop"),
        (Custom(lambda group: mask([0], "", keep_reward=True)), "filter Custom gave the reason '' to mask"),
    ],
)
def test_a_filter_that_breaks_the_contract_is_named(filter_: BaseRolloutFilter, says: str) -> None:
    with pytest.raises(FilterError, match=says):
        run(filter_)


def test_a_list_tag_cannot_be_changed_in_place() -> None:
    group = fake_group(0, GOOD)

    def append(view: GroupView) -> Verdict:
        cast("list[float | None]", view.rewards).append(2.0)
        return keep()

    with pytest.raises(AttributeError) as raised:
        run(Custom(append), group)
    assert raised.value.__notes__ == ["raised by filter Custom"]
    assert list(group.rewards) == GOOD


def test_a_filter_cannot_reorder_the_groups_under_the_chains_feet() -> None:
    def reverse(groups: Sequence[GroupView]) -> list[Verdict]:
        order = sorted(groups, key=lambda group: -group.group)
        getattr(groups, "reverse", lambda: None)()
        assert [group.group for group in order] == [1, 0]
        return [drop("zero") if group.group == 0 else keep() for group in groups]

    assert run(Many(reverse)) == ["Many/zero", None]


def test_the_filters_own_error_comes_through_with_its_name() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run(Custom(lambda group: 1 / 0))
    assert raised.value.__notes__ == ["raised by filter Custom"]


def test_a_filter_that_gives_no_list_is_named() -> None:
    with pytest.raises(TypeError) as raised:
        run(Many(lambda groups: None))
    assert raised.value.__notes__ == ["raised by filter Many"]


def without(tag: str) -> GroupMeta:
    group = fake_group(1, GOOD)
    return GroupMeta(group.keys, {name: value for name, value in group.tags.items() if name != tag})


@pytest.mark.parametrize(
    ("filter_", "tag"),
    [
        (Staleness(), "version"),
        (Staleness(), "dataset"),
        (ZeroStd(tag="acc"), "acc"),
        (DynamicSampling(low=0.1, tag="acc"), "acc"),
    ],
)
def test_a_missing_tag_is_an_error_naming_filter_key_and_tag_before_any_verdict(
    filter_: BaseRolloutFilter, tag: str
) -> None:
    """CASE-A3, CASE-C12: never a silent keep or drop; checked for all groups before the first filter is asked."""
    seen: list[int] = []

    def note(group: GroupView) -> Verdict:
        seen.append(group.group)
        return drop("first")

    with pytest.raises(TagError, match=f"filter {filter_.name} needs tag '{tag}', which v0_p1_g0 lacks"):
        Chain([Custom(note), filter_]).judge([fake_group(0, GOOD, acc=GOOD), without(tag)], CONTEXT)
    assert seen == []


@pytest.mark.parametrize("tag", ["reward", "status", "trainable_tokens"])
def test_a_group_without_the_tags_that_every_group_carries_is_an_error(tag: str) -> None:
    """C12."""
    with pytest.raises(TagError, match=f"v0_p1_g0: tag '{tag}' is missing"):
        run(Custom(lambda group: keep()), without(tag))


def test_a_tag_that_the_filter_did_not_declare_is_an_error_with_all_three_names() -> None:
    with pytest.raises(TagError, match="filter Custom: v0_p0_g0: tag 'acc' is missing"):
        run(Custom(lambda group: drop("x") if sum(group.tag("acc")) else keep()))


@pytest.mark.parametrize("value", [None, float("nan"), "high"])
def test_a_live_sample_without_a_number_in_the_filters_tag_is_an_error(value: object) -> None:
    with pytest.raises(TagError, match="filter zero_std: v0_p0_g1: tag 'acc' is"):
        run(ZeroStd(tag="acc"), fake_group(0, GOOD, acc=[0.0, value]))


@pytest.mark.parametrize("version", [None, 3.0, True, "3", [3, 3]])
def test_a_version_that_is_no_integer_is_an_error(version: object) -> None:
    """CASE-A3: a missing or odd version never counts as age 0."""
    with pytest.raises(TagError, match="tag 'version' is"):
        run(Staleness(max_age=9), fake_group(0, GOOD).stamp(version=version))
