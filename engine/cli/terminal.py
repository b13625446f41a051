"""The terminal around a run: what `asyncrl train` shows of it, from its first line to its last words."""

import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn, cast

import psutil
import typer
from rich.console import Console

from asyncrl.configs import RunConfig
from asyncrl.engine.cli.view import View, final_lines
from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.running.host import Host
from asyncrl.engine.running.outcome import RunFailed, Summary
from asyncrl.engine.running.output import standard_output
from asyncrl.engine.running.signals import kill_everything

if TYPE_CHECKING:
    from asyncrl.engine.loop.controller import Controller


class Terminal(Host):
    """Shows a run on standard output. Its times count from the start of the process: that is what a user waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.began_wall = psutil.Process().create_time()
        self._console = Console(file=cast(IO[str], standard_output()))
        self._view: View | None = None

    def tell(self, line: str) -> None:
        self._print(f"asyncrl train: {line}")

    def begin(self, config: RunConfig, directory: Path, *, ledger: Ledger, progress: Progress) -> None:
        self._print(
            f"asyncrl train: {_what(config)}, runtime {config.run.runtime}, max_staleness "
            f"{config.rollout.max_staleness}, run-ahead {config.run_ahead_groups} groups, max_publish_lag "
            f"{config.max_publish_lag}, seed {config.run.seed}, in {directory}"
        )
        self._view = View(
            ledger=ledger,
            progress=progress,
            console=self._console,
            clock=time.monotonic,
            bias_warning=config.rollout.bias_warning,
        )

    def watch(self, controller: "Controller") -> None:
        assert self._view is not None
        self._view.watch(controller)

    async def show(self) -> None:
        assert self._view is not None
        await self._view.run()

    def complain(self, line: str) -> None:
        with suppress(OSError):  # A terminal that is gone.
            typer.echo(line, err=True)

    def kill(self, code: int) -> NoReturn:
        """End the process, with every child of it."""
        kill_everything(code)

    def end(self, summary: Summary) -> None:
        """Print the last words of a run."""
        for line in final_lines(summary.to_dict(), str(summary.directory)):
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _what(config: RunConfig) -> str:
    """Say what is trained: an environment, a task, or data and rewards in its place."""
    data, rewards = config.data, ", ".join(entry["name"] for entry in config.reward.functions)
    named = f"data {data.path or ', '.join(entry.path for entry in data.sets)}" if data.given else ""
    task = "" if data.given and rewards else f"task {config.task.name}"
    if config.environment.name is not None:
        task = f"environment {config.environment.name}"
    return ", ".join(filter(None, (task, named, f"rewards {rewards}" if rewards else "")))


def explain(failed: RunFailed) -> None:
    """Print a line for each lost file; the first cause of another failure with traceback and where to look."""
    cause = failed.__cause__
    named = [*failed.lost, *([cause] if isinstance(cause, NotWritten) else [])]
    for line in dict.fromkeys(map(str, named)):
        _say(line)
    if cause is not None and not isinstance(cause, NotWritten):
        typer.echo("".join(traceback.format_exception(cause)).rstrip(), err=True)
        _say(str(failed))


def _say(line: str) -> None:
    typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
