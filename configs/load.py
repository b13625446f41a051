"""From YAML to a RunConfig: default preset, then preset or file, then options, then `--set`.

The source of each value is kept, and every error names the option as the user gave it.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.configs.allowed import allowed_at
from asyncrl.configs.schema import RunConfig
from asyncrl.configs.text import read_yaml
from asyncrl.engine.bounds import read_text
from asyncrl.engine.errors import ConfigError

DEFAULT_PRESET = "default"

LARGEST_FILE = 1 << 18
"""Bytes of a configuration, which has some thousands: parsing takes two seconds per MiB."""
_SHOWN = 200

RENAMED = {
    **{f"trainer.warm_up_{name}": f"trainer.sft_warm_up_{name}" for name in ("steps", "batch", "learning_rate")},
    "trainer.least_step_s": "trainer.min_step_s",
}
"""Old names of keys, which logs of older runs have."""

FREE = ("task.options", "environment.options")
"""Maps with free content: each is one value, not a level of keys."""


@dataclass(frozen=True, slots=True)
class Override:
    """One value given outside a file; `source` is the option as typed."""

    path: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration, and the source of each value by its dotted path."""

    config: RunConfig
    sources: Mapping[str, str]


def preset_names() -> list[str]:
    folder = resources.files("asyncrl.configs") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def parse_set(text: str) -> Override:
    """Parse `section.key=value`; the value is YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {text}: write it as section.key=value")
    return Override(path.strip(), parse_value(value, f"--set {text}"), f"--set {text}")


def parse_value(text: str, source: str) -> Any:
    """Parse one value as YAML; ConfigError, with `source`, if it is not YAML."""
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error


def load_config(
    name_or_file: str | PathLike[str] = DEFAULT_PRESET, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the configuration of a preset or a YAML file, with `overrides` on top.

    Keys are paths, as in `load_config("default", {"rollout.max_staleness": 2, "run.runtime": "local"})`, or
    sections, as in `{"rollout": {"max_staleness": 2}}`. ConfigError names key, value and range of what is wrong.
    """
    return load(fspath(name_or_file), as_overrides(overrides or {}), option="config").config


def as_overrides(values: Mapping[str, Any], source: str = "overrides") -> list[Override]:
    """Return values by path or by section, each as an override from `source`."""
    for key in values:
        if not isinstance(key, str):
            raise TypeError(f"{source} has the key {key!r}; keys are strings, as in 'rollout.max_staleness'")
    return [Override(path, value, source) for path, value in _leaves(values)]


def load(
    name_or_file: str = DEFAULT_PRESET,
    overrides: Sequence[Override] = (),
    filters: Sequence[str] = (),
    *,
    rewards: Sequence[str] = (),
    option: str = "--config",
) -> Loaded:
    """Resolve a configuration; ConfigError names option, value and range for whatever is wrong.

    `filters` are appended to the chain, before `dynamic_sampling`, and `rewards` to the reward functions. `option` is
    what errors call `name_or_file`.
    """
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = [(DEFAULT_PRESET, _preset(DEFAULT_PRESET))]
    if name_or_file != DEFAULT_PRESET:
        layers.append(_named(name_or_file, option))
    for name, layer in layers:
        _merge(tree, layer, sources, name)
    for override in overrides:
        _assign(tree, override, sources)
    if filters and isinstance(tree["filters"], list):
        chain = list(tree["filters"])
        names = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in chain]
        at = names.index("dynamic_sampling") if "dynamic_sampling" in names else len(chain)
        tree["filters"] = [*chain[:at], *({"name": name} for name in filters), *chain[at:]]
        sources["filters"] = f"{sources['filters']}, --filter {' '.join(filters)}"
    functions = tree["reward"]["functions"]
    if rewards and isinstance(functions, list):
        tree["reward"]["functions"] = [*functions, *({"name": name} for name in rewards)]
        sources["reward.functions"] = f"{sources['reward.functions']}, --reward {' '.join(rewards)}"
    try:
        return Loaded(RunConfig.model_validate(tree), sources)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, sources))) from None


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as dotted paths to values."""
    return dict(_leaves(config.model_dump()))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in FREE:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _preset(name: str) -> dict[str, Any]:
    # Layers are merged into each other.
    return deepcopy(_packaged(name))


@cache
def _packaged(name: str) -> dict[str, Any]:
    text = (resources.files("asyncrl.configs") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = read_yaml(text)
    return tree


def _named(name_or_file: str, option: str) -> tuple[str, dict[str, Any]]:
    if name_or_file in preset_names():
        return name_or_file, _preset(name_or_file)
    path = Path(name_or_file)
    if not path.is_file():
        close = difflib.get_close_matches(name_or_file, preset_names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{option} {name_or_file} is neither a file nor a preset ({', '.join(preset_names())}){hint}")
    try:
        tree = read_yaml(read_text(path, LARGEST_FILE, ConfigError))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {name_or_file} is not YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{option} {name_or_file} cannot be read: {error.strerror}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{option} {name_or_file} must hold sections, not {type(tree).__name__}")
    return name_or_file, tree


def _merge(tree: dict[str, Any], layer: Mapping[str, Any], sources: dict[str, str], source: str) -> None:
    for path, value in _leaves(layer):
        _assign(tree, Override(path, value, source), sources)


def _assign(tree: dict[str, Any], override: Override, sources: dict[str, str]) -> None:
    *sections, last = override.path.split(".")
    known: Any = RunConfig
    for depth, name in enumerate([*sections, last]):
        where = ".".join([*sections, last][:depth])
        if where in FREE:
            break
        fields = known.model_fields if isinstance(known, type) and issubclass(known, BaseModel) else {}
        if name not in fields:
            raise ConfigError(_unknown(override, where, name, list(fields)))
        known = fields[name].annotation
    if isinstance(known, type) and issubclass(known, BaseModel) and override.path not in FREE:
        raise ConfigError(
            f"{override.source}: {override.path} is a section; set one of its keys: {', '.join(known.model_fields)}"
        )
    node = tree
    for name in sections:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = override.value
    free = next((place for place in FREE if override.path.startswith(f"{place}.")), override.path)
    sources[free] = override.source


def _unknown(override: Override, where: str, name: str, known: Sequence[str]) -> str:
    place = f"section {where!r}" if where else "the configuration"
    if override.path in RENAMED:
        return f"{override.source}: {place} has no key {name!r} any more; it is {RENAMED[override.path]}"
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        hint = f"did you mean {'.'.join(filter(None, (where, close[0])))}?"
    else:
        elsewhere = [
            f"{section}.{name}"
            for section, field in RunConfig.model_fields.items()
            if isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)
            and name in field.annotation.model_fields
        ]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"it has {', '.join(known) or 'no keys'}"
    return f"{override.source}: {place} has no key {name!r}; {hint}"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        allowed = allowed_at(RunConfig, problem["loc"], too_much=problem["type"] == "less_than_equal")
        message = (
            f"it must be {allowed}"
            if allowed and problem["type"] != "value_error"  # The schema's own words say more.
            else problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
        )
        if not path:
            yield message
            continue
        # A list that was given as one value has sources for itself alone.
        above = [".".join(map(str, problem["loc"][:end])) for end in range(len(problem["loc"]), 0, -1)]
        given = _shortened(next((sources[one] for one in above if one in sources), "the configuration"))
        named = f"{given} ({path})" if given.startswith("--") else f"{path} (from {given})"
        yield f"{named} is {_shortened(repr(problem.get('input')))}; {message}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
