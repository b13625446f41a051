"""`asyncrl config`: prints the resolved configuration with the source of each value, or explains its keys."""

import json
import textwrap
from typing import Annotated

import typer

from asyncrl.configs import Loaded, flatten
from asyncrl.configs.reference import Entry, explain
from asyncrl.engine.cli.options import ConfigOption, FilterOption, RewardOption, SetOption, check, fail, resolve
from asyncrl.engine.errors import ConfigError


def show_config(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="With --explain: a key or a section; all keys by default.")
    ] = None,
    config: ConfigOption = "default",
    filter_: FilterOption = None,
    reward: RewardOption = None,
    set_: SetOption = None,
    explain_: Annotated[
        bool, typer.Option("--explain", help="Print what each key takes, its default and its meaning.")
    ] = False,
) -> None:
    """Print every value in force and its source, or explain keys."""
    if not explain_:
        if key is not None:
            fail(f"config {key}: to explain a key, write asyncrl config --explain {key}")
        loaded = resolve(config, [], filter_ or [], set_ or [], rewards=reward or [])
        check(loaded)
        typer.echo(describe(loaded))
        return
    try:
        entries = explain(key)
    except ConfigError as error:
        fail(str(error))
    typer.echo("\n\n".join(map(_explained, entries)))


def _explained(entry: Entry) -> str:
    meaning = textwrap.fill(entry.meaning, width=100, initial_indent="    ", subsequent_indent="    ")
    return f"{entry.path}: {entry.takes}; default {entry.default}\n{meaning}"


def describe(loaded: Loaded) -> str:
    """Return one line per value: path, value, source."""
    values = {path: json.dumps(value) for path, value in flatten(loaded.config).items()}
    wide = max(map(len, values))
    return "\n".join(f"{path:<{wide}} = {value}  # {loaded.sources[path]}" for path, value in values.items())
