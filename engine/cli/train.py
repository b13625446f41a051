"""`asyncrl train`: read the options, run, say how it ended."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl.engine.cli.config import describe
from asyncrl.engine.cli.options import (
    AllowCodeOption,
    ConfigOption,
    FilterOption,
    RewardOption,
    SetOption,
    check,
    fail,
    overrides,
    resolve,
    see_user_folder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncrl.configs import Loaded, Override
    from asyncrl.engine.running.resume import Resumption


_PATHS = {
    "data": "data.path",
    "model": "model.path",
    "max_staleness": "rollout.max_staleness",
    "steps": "run.steps",
    "seed": "run.seed",
    "run_dir": "run.directory",
    "runtime": "run.runtime",
    "ray_address": "cluster.address",
    "record": "run.record",
}
"""The value that each option sets, by the parameter of `train`."""


def train(
    context: typer.Context,
    config: ConfigOption = "default",
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts: a .jsonl or .parquet file, or a data set of `datasets`."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A Hugging Face checkpoint, a model of the Hub (owner/name), or smollm2."),
    ] = None,
    max_staleness: Annotated[
        str | None,
        typer.Option(metavar="N", help="Largest age, in weight versions, of any token trained on; 0 is synchronous."),
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="End after this many training steps.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of weights, prompt order and sampling.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder for event log, logs and summary.")] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="ray|local", help="Actors on Ray, or all in this process.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT|auto", help="Join this Ray cluster; by default RAY_ADDRESS's, else start one."),
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="events|tensors", help="Keep each step's tensors beside the event log.")
    ] = None,
    filter_: FilterOption = None,
    reward: RewardOption = None,
    set_: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN|auto", help="Go on with this run, or with the newest under runs/."),
    ] = None,
    allow_code: AllowCodeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the values, and stop.")] = False,
) -> None:
    """Train a model. Exit code 0: done; 1: failed; 2: bad input; 130, 143, 129: ended by Ctrl-C, SIGTERM, SIGHUP."""
    options = _options(context.params)
    _check_together(context.params)
    if resume is not None:
        given = overrides(options, set_ or [])
        named = config if _is_named(context, "config") else None
        raise typer.Exit(_resume(resume, named, given, allow_code=allow_code or [], dry_run=dry_run))
    loaded = resolve(config, options, filter_ or [], set_ or [], rewards=reward or [])
    if dry_run:
        check(loaded)
        _check_directory(loaded)
        typer.echo(describe(loaded))
        return
    raise typer.Exit(_train(loaded, _directory(loaded)))


def load_words(words: "Sequence[str]") -> "Loaded":
    """Load what `asyncrl train` would with these words, which run elsewhere: of a run to be resumed only the options.

    Ends the process with code 2, and the command's own message, for words that it refuses.
    """
    command = typer.Typer(add_completion=False)
    command.command()(train)
    given = typer.main.get_command(command).make_context("asyncrl train", [*words]).params
    _check_together(given)
    rewards = given["reward"] or []
    return resolve(given["config"], _options(given), given["filter_"] or [], given["set_"] or [], rewards=rewards)


def _options(given: "Mapping[str, Any]") -> list[tuple[str, str, str | None]]:
    """Return (option, path, value) of the options that set one value each."""
    return [(f"--{name.replace('_', '-')}", path, given[name]) for name, path in _PATHS.items()]


def _check_together(given: "Mapping[str, Any]") -> None:
    if given["resume"] is None and given["allow_code"]:
        fail("--allow-code is for what a run's own files name: it goes with --resume; leave it out")
    if given["resume"] is not None and (given["filter_"] or given["reward"]):
        fail("--resume goes on with the run's own filters and rewards; leave --filter and --reward out")


def _is_named(context: typer.Context, name: str) -> bool:
    """Whether the user gave this option, be it with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _resume(
    run: str, config: str | None, given: "Sequence[Override]", *, allow_code: "Sequence[str]", dry_run: bool
) -> int:
    """Go on with a run; returns the exit code. A configuration that is named is compared with the run's own."""
    from asyncrl.configs import load
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.resume import AUTO, check_same_folder, find, newest_run, resumed_config

    see_user_folder()
    try:
        found = find(newest_run() if run == AUTO else Path(run))
        loaded = resumed_config(found, given, allow_code=allow_code) if config is None else load(config, given)
        check_same_folder(found, loaded)
    except ConfigError as error:
        fail(str(error))
    if dry_run:
        _check_changes(found, loaded)
        typer.echo(describe(loaded))
        return 0
    return _train(loaded, found.directory, resume=found)


def _check_changes(found: "Resumption", loaded: "Loaded") -> None:
    """Check a run that goes on, and say what would differ; ends the process with code 2 for what may not."""
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.resume import check_changes

    checked = check(loaded)
    if checked is None:
        return
    # It imports torch.
    from asyncrl.engine.lifecycle.checks import with_packing

    found_model, task = checked
    try:
        config = with_packing(found_model, extras=task.task.extras).config.model_dump()
        for change in check_changes(found, config, prompts=task.prompt_count):
            typer.echo(f"would go on with {change}", err=True)
    except ConfigError as error:
        fail(str(error))


def _check_directory(loaded: "Loaded") -> None:
    """Check the folder of a new run; ends the process with code 2 if it cannot be made."""
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.run_files import check_directory, name_of_directory

    directory = _directory(loaded)
    try:
        check_directory(directory, named=name_of_directory(loaded, directory))
    except ConfigError as error:
        fail(str(error))


def _directory(loaded: "Loaded") -> Path:
    """Return the folder that is configured, or a new one, named by the time."""
    if loaded.config.run.directory:
        return Path(loaded.config.run.directory)
    name = time.strftime("%Y%m%d-%H%M%S")
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def _train(loaded: "Loaded", directory: Path, *, resume: "Resumption | None" = None) -> int:
    """Run, and print the last words; returns the exit code."""
    from asyncrl.engine.cli.terminal import Terminal, explain
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.run import run
    from asyncrl.engine.running.outcome import RunFailed, RunInterrupted

    terminal = Terminal()
    failed: RunFailed | None = None
    try:
        summary = run(loaded, directory, host=terminal, resume=resume or False)
    except ConfigError as error:
        fail(str(error))
    except RunInterrupted as interrupted:
        summary = interrupted.summary
    except RunFailed as error:
        failed, summary = error, error.summary
    terminal.end(summary)
    if failed is not None:
        with suppress(OSError):  # A terminal that is gone.
            explain(failed)
    return summary.exit_code
