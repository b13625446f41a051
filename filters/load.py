"""From configuration to filters: built-in names, entry points, or `module:Class`."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from asyncrl.configs.objects import load_object
from asyncrl.configs.parameters import check_parameters
from asyncrl.engine.errors import ConfigError
from asyncrl.filters.base import BaseRolloutFilter
from asyncrl.filters.builtin.content import Duplicate, Repetition
from asyncrl.filters.builtin.dynamic_sampling import DynamicSampling
from asyncrl.filters.builtin.history import Difficulty, Quota
from asyncrl.filters.builtin.importance import ImportanceOutliers
from asyncrl.filters.builtin.length import Length, Overlong, Truncated
from asyncrl.filters.builtin.reward import FiniteReward, MinLive
from asyncrl.filters.builtin.staleness import Staleness
from asyncrl.filters.builtin.zero_std import ZeroStd
from asyncrl.filters.chain import Chain

ENTRY_POINT_GROUP = "asyncrl.filters"

BUILT_IN: Mapping[str, type[BaseRolloutFilter]] = {
    "staleness": Staleness,
    "zero_std": ZeroStd,
    "dynamic_sampling": DynamicSampling,
    "difficulty": Difficulty,
    "length": Length,
    "overlong": Overlong,
    "truncated": Truncated,
    "repetition": Repetition,
    "duplicate": Duplicate,
    "finite_reward": FiniteReward,
    "min_live": MinLive,
    "quota": Quota,
    "importance_outliers": ImportanceOutliers,
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
                f"filter {name!r} is unknown{hint}; known filters are {', '.join(known)}, and module:Class for your own"
            )
        found = load_object(points[name].value, option=f"filter {name}, an entry point:")
    if not (inspect.isclass(found) and issubclass(found, BaseRolloutFilter)):
        raise ConfigError(f"filter {name} is {found!r}, not a subclass of BaseRolloutFilter")
    return found


def build_filter(entry: Mapping[str, Any]) -> BaseRolloutFilter:
    """Build one filter from a configuration entry; ConfigError if its parameters do not fit its constructor."""
    name = entry["name"]
    parameters = {key: value for key, value in entry.items() if key != "name"}
    filter_class = load_class(name)
    check_parameters(f"filter {name}", filter_class, parameters, explained=f"; asyncrl filters show {name} explains it")
    try:
        return filter_class(**parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"filter {name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A user's code may raise anything.
        raise ConfigError(f"filter {name}: its constructor raised {error!r}") from error


def flatten_chain(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries in order, with nested chains (`{name: chain, filters: [...]}`) replaced by their filters."""
    flat: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["name"] != "chain":
            flat.append(entry)
            continue
        nested = entry.get("filters")
        unknown = sorted(set(entry) - {"name", "filters"})
        if unknown or not isinstance(nested, list) or not all(isinstance(e, dict) and "name" in e for e in nested):
            raise ConfigError(f"filter chain: write {{name: chain, filters: [{{name: ...}}, ...]}}, not {dict(entry)}")
        flat += flatten_chain(nested)
    return flat


def with_objects(
    entries: Sequence[Mapping[str, Any]], objects: Sequence[BaseRolloutFilter]
) -> list[Mapping[str, Any] | BaseRolloutFilter]:
    """Return the chain's entries, flat, with filters that are objects already in place: before `dynamic_sampling`."""
    flat = flatten_chain(entries)
    at = next((i for i, entry in enumerate(flat) if entry["name"] == "dynamic_sampling"), len(flat))
    return [*flat[:at], *objects, *flat[at:]]


def object_name(filter_: BaseRolloutFilter) -> str:
    """Return `module:Class`, by which a log names a filter that was given as an object."""
    return f"{type(filter_).__module__}:{type(filter_).__qualname__}"


def check_objects(filters: Sequence[BaseRolloutFilter]) -> tuple[BaseRolloutFilter, ...]:
    """Return filters that a caller gives as objects; TypeError if one is not a filter."""
    if isinstance(filters, str | BaseRolloutFilter) or not isinstance(filters, Iterable):
        raise TypeError(f"filters is {filters!r}; it must be a list of filter objects, as in filters=[ShortOnly()]")
    given = tuple(filters)
    for place, one in enumerate(given):
        if isinstance(one, BaseRolloutFilter):
            continue
        hint = "it must be an object of a subclass of BaseRolloutFilter"
        if inspect.isclass(one) and issubclass(one, BaseRolloutFilter):
            hint = f"it is a class; give an object of it, {one.__name__}(...)"
        elif isinstance(one, str):
            hint = "give an object, or name it under `filters` in the configuration"
        raise TypeError(f"filters[{place}] is {one!r}; {hint}")
    return given


def build_chain(
    entries: Sequence[Mapping[str, Any] | BaseRolloutFilter],
    *,
    min_live: int,
    clock: Callable[[], float] | None = None,
) -> Chain:
    """Build the chain that a configuration lists; an entry may be a filter already (`with_objects`)."""
    filters: list[BaseRolloutFilter] = []
    for entry in entries:
        if isinstance(entry, BaseRolloutFilter):
            filters.append(entry)
        else:
            filters += map(build_filter, flatten_chain([entry]))
    refills = {f.refill for f in filters if isinstance(f, DynamicSampling)}
    if len(refills) > 1:
        raise ConfigError(
            "filters: dynamic_sampling occurs more than once with different max_attempts or on_exhausted; "
            "a batch has one budget, so all of them must be equal"
        )
    return Chain(filters, min_live=min_live, clock=clock)
