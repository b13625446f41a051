"""`asyncrl train`: read the options, run, say how it ended."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.engine.cli.config import describe
from asyncrl.engine.cli.options import (
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
    from collections.abc import Sequence

    from asyncrl.configs import Loaded, Override
    from asyncrl.engine.running.resume import Resumption


def train(
    config: ConfigOption = "default",
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts: a .jsonl or .parquet file, or a data set of `datasets`."),
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the values, and stop.")] = False,
) -> None:
    """Train a model. Exit code 0: done; 1: failed; 2: bad input; 130, 143, 129: ended by Ctrl-C, SIGTERM, SIGHUP."""
    options = [
        ("--data", "data.path", data),
        ("--max-staleness", "rollout.max_staleness", max_staleness),
        ("--steps", "run.steps", steps),
        ("--seed", "run.seed", seed),
        ("--run-dir", "run.directory", run_dir),
        ("--runtime", "run.runtime", runtime),
        ("--record", "run.record", record),
    ]
    if resume is not None:
        if filter_ or reward:
            fail("--resume goes on with the run's own filters and rewards; leave --filter and --reward out")
        raise typer.Exit(_resume(resume, config, overrides(options, set_ or []), dry_run=dry_run))
    loaded = resolve(config, options, filter_ or [], set_ or [], rewards=reward or [])
    if dry_run:
        check(loaded)
        typer.echo(describe(loaded))
        return
    raise typer.Exit(_train(loaded, _directory(loaded)))


def _resume(run: str, config: str, given: "Sequence[Override]", *, dry_run: bool) -> int:
    """Go on with a run; returns the exit code. A configuration that is named is compared with the run's own."""
    from asyncrl.configs import load
    from asyncrl.configs.load import DEFAULT_PRESET
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.resume import AUTO, find, newest_run, resumed_config

    see_user_folder()
    try:
        found = find(newest_run() if run == AUTO else Path(run))
        loaded = resumed_config(found, given) if config == DEFAULT_PRESET else load(config, given)
    except ConfigError as error:
        fail(str(error))
    if dry_run:
        check(loaded)
        typer.echo(describe(loaded))
        return 0
    return _train(loaded, found.directory, resume=found)


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
