"""Options that commands share, and how they become a checked configuration."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from asyncrl.configs import Loaded, Override, load, parse_set, parse_value, preset_names
from asyncrl.engine.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.collectors.tasks.prepared import PreparedTask

ConfigOption = Annotated[str, typer.Option("--config", help=f"A preset ({', '.join(preset_names())}) or a YAML file.")]
FilterOption = Annotated[
    list[str] | None,
    typer.Option("--filter", help="Append a filter, module:Class, to the chain (repeatable)."),
]
RewardOption = Annotated[
    list[str] | None,
    typer.Option("--reward", help="Append a reward function, built in or my_reward.py:function (repeatable)."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Set any value: section.key=value (repeatable).")]
AllowCodeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="NAME",
        help="Import this code, module:Name or file.py:Name, which only the run's own files name (repeatable).",
    ),
]


_TEXT = ("data.path", "evaluation.path", "model.path", "run.directory", "run.runtime", "cluster.address")


def number(least: int, most: float = math.inf, *, kind: type[int] | type[float] = int) -> Callable[[Any], Any]:
    """Return a parser of numbers from `least` to `most`, which refuses others with value and range.

    The command line's own check leaves out the value that was given.
    """
    limit = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
    words = f"{'an integer' if kind is int else 'a number'} {limit}"

    def parse(given: Any) -> Any:
        try:
            value = kind(given)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"it is {given}; it must be {words}")
        return value

    return parse


def resolve(
    config: str,
    options: Sequence[tuple[str, str, str | None]],
    filters: Sequence[str],
    sets: Sequence[str],
    *,
    rewards: Sequence[str] = (),
) -> Loaded:
    """Load a configuration; `options` are (option, path, value), unset where the value is None.

    Ends the process with code 2 and a message for whatever is wrong.
    """
    see_user_folder()
    try:
        return load(config, overrides(options, sets), filters, rewards=rewards)
    except ConfigError as error:
        fail(str(error))


def overrides(options: Sequence[tuple[str, str, str | None]], sets: Sequence[str]) -> list[Override]:
    """Return what options and `--set` give; ends the process with code 2 if one cannot be parsed."""
    try:
        # Values stay text until the schema has its say: one message, with the range, for every kind of mistake.
        given = [
            Override(path, value if path in _TEXT else parse_value(value, option), option)
            for option, path, value in options
            if value is not None
        ]
        return [*given, *map(parse_set, sets)]
    except ConfigError as error:
        fail(str(error))


def check(loaded: Loaded) -> "tuple[Loaded, PreparedTask] | None":
    """Make the checks that a run makes before it starts; ends the process with code 2 where one fails.

    Returns the task, and the configuration with the model's folder. It makes and fetches no model: if one has to be, it
    says so, checks what needs none, and returns None.
    """
    from asyncrl.engine.running.checks import check_runnable, check_without_model, warnings_of
    from asyncrl.engine.running.named_model import what_comes_first, with_cached_model

    try:
        first = what_comes_first(loaded)
        if first is not None:
            check_without_model(loaded)
            typer.echo(
                f"model.path is {loaded.config.model.path!r}: a run would first {first}; what needs the model was not "
                "checked",
                err=True,
            )
            return None
        loaded = with_cached_model(loaded, typer.echo)
        task = check_runnable(loaded)
        for line in [*warnings_of(loaded.config), *task.warnings]:
            typer.echo(f"warning: {line}", err=True)
        return loaded, task
    except ConfigError as error:
        fail(str(error))


def matching(pattern: str, must: str) -> Callable[[str], str]:
    """Return a parser of texts that match `pattern` as a whole, which refuses others with what they `must` be."""

    def parse(given: str) -> str:
        if not re.fullmatch(pattern, given, flags=re.ASCII):
            raise typer.BadParameter(f"it is {given!r}; it must be {must}")
        return given

    return parse


def see_user_folder() -> None:
    """Make modules of the user's folder importable; a console script does not. Last, so it shadows nothing."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def check_folder() -> None:
    """End with code 2 where the working folder was deleted, which no command can work in."""
    try:
        Path.cwd()
    except OSError as error:
        fail(f"the working folder cannot be used: {error.strerror}; change to one that is there")


def fail(message: str) -> NoReturn:
    """Print what is wrong and end with code 2."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)
