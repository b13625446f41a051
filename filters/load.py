"""From configuration to filters: built-in names, entry points, or `module:Class`."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from asyncrl.configs.objects import load_object
from asyncrl.engine.errors import ConfigError
from asyncrl.filters.base import BaseRolloutFilter, parameters_of
from asyncrl.filters.chain import Chain
from asyncrl.filters.dynamic_sampling import DynamicSampling
from asyncrl.filters.staleness import Staleness
from asyncrl.filters.zero_std import ZeroStd

ENTRY_POINT_GROUP = "asyncrl.filters"

BUILT_IN: Mapping[str, type[BaseRolloutFilter]] = {
    "staleness": Staleness,
    "zero_std": ZeroStd,
    "dynamic_sampling": DynamicSampling,
}


def load_class(name: str) -> type[BaseRolloutFilter]:
    """Find a filter's class by built-in name, entry point or module:Class."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        found = load_object(name, option="filter")
    else:
        points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        if name not in points:
            known = [*BUILT_IN, *points]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"filter {name!r} is unknown{hint}; known are {', '.join(known)}, and module:Class for your own"
            )
        found = load_object(points[name].value, option=f"filter {name}, an entry point:")
    if not (inspect.isclass(found) and issubclass(found, BaseRolloutFilter)):
        raise ConfigError(f"filter {name} is {found!r}, not a subclass of BaseRolloutFilter")
    return found


def build_filter(entry: Mapping[str, Any]) -> BaseRolloutFilter:
    """Build one filter from a configuration entry; parameters are checked by its own signature."""
    name = entry["name"]
    parameters = {key: value for key, value in entry.items() if key != "name"}
    filter_class = load_class(name)
    known = parameters_of(filter_class)
    for key in parameters:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"filter {name} has no parameter {key!r}{hint}")
    try:
        return filter_class(**parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"filter {name}: {error}") from error


def build_chain(
    entries: Sequence[Mapping[str, Any]], *, min_live: int, clock: Callable[[], float] | None = None
) -> Chain:
    """Build the chain that a configuration lists."""
    return Chain([build_filter(entry) for entry in entries], min_live=min_live, clock=clock)
