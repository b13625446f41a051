"""Sweeps: names, tables and bars."""

from collections.abc import Callable

import pytest

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.simulate.sweep import COLUMNS, parse_sweep, plot, table

Small = Callable[..., RunConfig]
FIGURES = {**dict.fromkeys(COLUMNS, 1.0), "length_ratio": None}


@pytest.mark.parametrize("name", ["max_staleness", "rollout.max_staleness"])
def test_a_value_may_be_named_by_its_path_or_its_last_part(small: Small, name: str) -> None:
    sweep = parse_sweep(f"{name}=0,1,8", small())
    assert (sweep.path, list(sweep.values)) == ("rollout.max_staleness", [0, 1, 8])
    assert [override.value for override in sweep.overrides()] == [0, 1, 8]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_stalenes=1", "did you mean max_staleness"),
        ("threads=1,2", "it could be collector.threads, trainer.threads"),
        ("max_staleness", "name=value"),
        ("max_staleness=", "name=value"),
    ],
)
def test_a_name_that_is_none_or_two_is_refused(small: Small, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_sweep(text, small())


def test_the_table_has_a_line_a_setting_and_all_lines_are_as_wide() -> None:
    lines = table("max_staleness", [("0", FIGURES), ("12", {**FIGURES, "mean_age": 1.23456})]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert "1.23" in lines[2]
    assert lines[1].split()[-1] == "-"


def test_bars_are_in_proportion() -> None:
    text = plot("max_staleness", [("0", FIGURES), ("1", {**FIGURES, "mean_age": 2.0})], ["mean_age"])
    short, long = (line.count("█") for line in text.splitlines()[1:])
    assert (short, long) == (20, 40)
