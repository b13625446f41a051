"""`asyncrl train`: read the options, run, say how it ended."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from collections.abc import Sequence

    from asyncrl.configs import Loaded, Override
    from asyncrl.engine.running.resume import Resumption


def train(
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
    options = [
        ("--data", "data.path", data),
        ("--model", "model.path", model),
        ("--max-staleness", "rollout.max_staleness", max_staleness),
        ("--steps", "run.steps", steps),
        ("--seed", "run.seed", seed),
        ("--run-dir", "run.directory", run_dir),
        ("--runtime", "run.runtime", runtime),
        ("--ray-address", "cluster.address", ray_address),
        ("--record", "run.record", record),
    ]
    if resume is not None:
        if filter_ or reward:
            fail("--resume goes on with the run's own filters and rewards; leave --filter and --reward out")
        given = overrides(options, set_ or [])
        raise typer.Exit(_resume(resume, config, given, allow_code=allow_code or [], dry_run=dry_run))
    if allow_code:
        fail("--allow-code is for what a run's own files name: it goes with --resume; leave it out")
    loaded = resolve(config, options, filter_ or [], set_ or [], rewards=reward or [])
    if dry_run:
        check(loaded)
        typer.echo(describe(loaded))
        return
    raise typer.Exit(_train(loaded, _directory(loaded)))


def _resume(run: str, config: str, given: "Sequence[Override]", *, allow_code: "Sequence[str]", dry_run: bool) -> int:
    """Go on with a run; returns the exit code. A configuration that is named is compared with the run's own."""
    from asyncrl.configs import load
    from asyncrl.configs.load import DEFAULT_PRESET
    from asyncrl.engine.errors import ConfigError
    from asyncrl.engine.running.resume import AUTO, find, newest_run, resumed_config

    see_user_folder()
    try:
        found = find(newest_run() if run == AUTO else Path(run))
        if config != DEFAULT_PRESET:
            loaded = load(config, given)
        else:
            loaded = resumed_config(found, given, allow_code=allow_code)
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
