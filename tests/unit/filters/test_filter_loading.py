"""From configuration entries to filters: names, module:Class, entry points, parameters."""

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.errors import ConfigError
from asyncrl.filters import Chain, build_chain, build_filter
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.filters.load import ENTRY_POINT_GROUP, load_class

SOURCE = """
from asyncrl.filters import BaseRolloutFilter, drop, keep


class TooLong(BaseRolloutFilter):
    def __init__(self, limit: int = 9):
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        self.limit = limit

    def judge(self, group, context):
        return drop("long") if max(group.lengths) > self.limit else keep()


class NoJudge(BaseRolloutFilter):
    pass


class Breaks(BaseRolloutFilter):
    def __init__(self, error: str = "KeyError"):
        raise {"KeyError": KeyError("limit"), "SystemExit": SystemExit(3)}[error]

    def judge(self, group, context):
        return None


def function(group):
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a user's folder on the path: `my_filters` with classes, and `asyncrl_plugin` as an installed package."""
    (tmp_path / "my_filters.py").write_text(SOURCE)
    (tmp_path / "broken_filters.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "exiting_filters.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "torn_filters.py").write_text("class Torn(\n")
    info = tmp_path / "asyncrl_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asyncrl-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\ntoo_long = my_filters:TooLong\ngone = my_filters:Gone\nbroken = broken_filters:X\n"
        "exiting = exiting_filters:X\ntorn = torn_filters:X\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    return "my_filters"


def test_built_in_names_give_their_classes_with_parameters() -> None:
    chain = build_chain(
        [{"name": "staleness"}, {"name": "zero_std", "tag": "acc"}, {"name": "dynamic_sampling", "max_attempts": 4}],
        min_live=2,
    )
    assert [type(f) for f in chain.filters] == [Staleness, ZeroStd, DynamicSampling]
    assert chain.filters[1].requires == ("acc",)
    assert isinstance(chain, Chain)
    assert chain.refill is not None
    assert chain.refill.max_attempts == 4


def test_two_filters_of_one_class_do_not_share_their_tag() -> None:
    chain = build_chain([{"name": "zero_std", "tag": "acc"}, {"name": "zero_std"}], min_live=2)
    assert [f.requires for f in chain.filters] == [("acc",), ("reward",)]


def test_module_and_class_name_a_users_own_filter(module: str) -> None:
    filter_: Any = build_filter({"name": f"{module}:TooLong", "limit": 3})
    assert (filter_.name, filter_.limit) == ("TooLong", 3)


def test_an_installed_package_offers_filters_by_entry_point(module: str) -> None:
    filter_: Any = build_filter({"name": "too_long", "limit": 5})
    assert (type(filter_).__name__, filter_.limit) == ("TooLong", 5)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "zerostd"}, "filter 'zerostd' is unknown; did you mean zero_std?"),
        ({"name": "quality"}, "filter 'quality' is unknown; known filters are staleness, zero_std, dynamic_sampling"),
        ({"name": "to_long"}, "did you mean too_long?"),
        ({"name": "zero_std", "tagg": "acc"}, "filter zero_std has no parameter 'tagg'; did you mean tag?"),
        ({"name": "staleness", "xyz": 1}, "has no parameter 'xyz'; it has max_age, max_age_by_dataset"),
        ({"name": "staleness", "max_age": -1}, "filter staleness: max_age is -1"),
        ({"name": "dynamic_sampling", "max_attempts": 0}, "filter dynamic_sampling: max_attempts is 0"),
        ({"name": "zero_std", "relative_tolerance": "x"}, "filter zero_std"),
        ({"name": "my_filters:TooLong", "limit": 0}, "filter my_filters:TooLong: limit is 0"),
        ({"name": "my_filters:TooLong", "limits": 2}, "no parameter 'limits'; did you mean limit?"),
        ({"name": "my_filters:TooLogn"}, "my_filters has no TooLogn; did you mean TooLong?"),
        ({"name": "my_filters:function"}, "not a subclass of BaseRolloutFilter"),
        ({"name": "my_filters:NoJudge"}, "filter my_filters:NoJudge.*judge"),
        ({"name": "no_such_module:Class"}, "cannot import no_such_module"),
        ({"name": "broken_filters:Class"}, "importing broken_filters raised"),
        ({"name": "my_filters:"}, "write it as module:Class"),
        ({"name": "gone"}, "my_filters has no Gone"),
        ({"name": "broken"}, "importing broken_filters raised"),
    ],
)
def test_an_entry_that_cannot_work_is_an_error_that_says_what_to_write(
    module: str, entry: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        build_filter(entry)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "my_filters:Breaks"}, r"filter my_filters:Breaks: its constructor raised KeyError\('limit'\)"),
        ({"name": "my_filters:Breaks", "error": "SystemExit"}, r"its constructor raised SystemExit\(3\)"),
        ({"name": "exiting_filters:X"}, r"importing exiting_filters raised SystemExit\(0\)"),
        ({"name": "torn_filters:X"}, r"torn_filters is not Python: '\(' was never closed \(torn_filters.py, line 1"),
        ({"name": "exiting"}, r"filter exiting, an entry point:.* raised SystemExit\(0\)"),
        ({"name": "torn"}, "filter torn, an entry point:.* torn_filters is not Python"),
    ],
)
def test_whatever_a_users_filter_raises_while_it_is_built_is_named(
    module: str, entry: dict[str, Any], says: str
) -> None:
    """FOUND-C16: by its constructor, or by its module's body."""
    with pytest.raises(ConfigError, match=says):
        build_filter(entry)


def test_a_class_that_is_no_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a subclass of BaseRolloutFilter"):
        load_class("pathlib:Path")
