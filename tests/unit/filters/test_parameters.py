"""Parameters from YAML are checked by name, need and type before a filter is built; the message says what to write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from asyncrl.engine.errors import ConfigError
from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, build_chain, build_filter, keep
from asyncrl.filters import load as loading

if TYPE_CHECKING:
    from decimal import Decimal


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "zero_std", "relative_tolerance": "x"}, "relative_tolerance is 'x'; it must be float"),
        ({"name": "length", "max_tokens": 1.5}, "max_tokens is 1.5; it must be int | null"),
        ({"name": "length", "max_tokens": True}, "max_tokens is True; it must be int | null"),
        ({"name": "length", "max_tokens": -4}, "max_tokens is -4; it must be at least 0"),
        ({"name": "length"}, "give min_tokens or max_tokens"),
        ({"name": "quota"}, "filter quota needs shares; asyncrl filters show quota explains it"),
        ({"name": "quota", "shares": [1, 2]}, "shares is [1, 2]; it must be Mapping[str, float]"),
        ({"name": "quota", "shares": {"math": "half"}}, "it must be Mapping[str, float]"),
        ({"name": "overlong", "keep_reward": "no"}, "keep_reward is 'no'; it must be bool"),
        ({"name": "repetition", "ngram": "4"}, "ngram is '4'; it must be int"),
        ({"name": "dynamic_sampling", "on_exhausted": "stop"}, "it must be Literal['error', 'train_partial', 'wait']"),
        ({"name": "difficulty", "low": float("nan")}, "low is nan and high 1.0; both must be numbers"),
        ({"name": "staleness", "max_mean_token_age": float("nan")}, "max_mean_token_age is nan"),
        ({"name": "importance_outliers", "max_log_ratio": float("nan")}, "max_log_ratio is nan"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name_value_and_type(entry: dict[str, Any], says: str) -> None:
    """J1."""
    with pytest.raises(ConfigError) as caught:
        build_filter(entry)
    assert says in str(caught.value)


def test_whole_numbers_do_for_floats_and_lists_for_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_filter({"name": "zero_std", "relative_tolerance": 0}).name == "zero_std"

    class Takes(BaseRolloutFilter):
        """`later` has a type that exists for type checkers only: the constructor has the word."""

        def __init__(self, pair: tuple[int, int] = (0, 1), names: Sequence[str] = (), **more: Any) -> None:
            self.given = (pair, names, more)

        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return keep()

    class TakesLater(Takes):
        def __init__(self, later: "Decimal") -> None:
            self.given = ((0, 0), (), {"later": later})

    monkeypatch.setattr(loading, "BUILT_IN", {"takes": Takes, "later": TakesLater})
    filter_: Any = build_filter({"name": "takes", "pair": [1, 2], "names": ["a"], "free": 3})
    assert filter_.given == ([1, 2], ["a"], {"free": 3})
    with pytest.raises(ConfigError, match="pair is"):
        build_filter({"name": "takes", "pair": [1]})
    later: Any = build_filter({"name": "later", "later": "1.5"})
    assert later.given[2] == {"later": "1.5"}


def test_two_refills_that_differ_are_refused() -> None:
    band = {"name": "dynamic_sampling", "low": 0.1}
    chain = build_chain([band, {"name": "dynamic_sampling", "tag": "acc", "high": 0.9}], min_live=2)
    assert chain.refill is not None
    with pytest.raises(ConfigError, match="a batch has one budget"):
        build_chain([band, {"name": "chain", "filters": [{**band, "max_attempts": 3}]}], min_live=2)
