"""`asyncrl config`: the resolved configuration, with where each value came from."""

import json

import typer

from asyncrl.configs import Loaded, flatten
from asyncrl.engine.cli.options import ConfigOption, FilterOption, SetOption, resolve


def show_config(config: ConfigOption = "default", filter_: FilterOption = None, set_: SetOption = None) -> None:
    """Print every value in force and its source."""
    typer.echo(describe(resolve(config, [], filter_ or [], set_ or [])))


def describe(loaded: Loaded) -> str:
    """Return one line a value: path, value, source."""
    values = {path: json.dumps(value) for path, value in flatten(loaded.config).items()}
    wide = max(map(len, values))
    return "\n".join(f"{path:<{wide}} = {value}  # {loaded.sources[path]}" for path, value in values.items())
