"""`asyncrl train`: check everything, start a world, run the controller, say how it ended."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from asyncrl.engine.cli.config import describe
from asyncrl.engine.cli.options import ConfigOption, FilterOption, SetOption, fail, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import anyio

    from asyncrl.collectors.tasks.prepared import PreparedTask
    from asyncrl.configs import Loaded, RunConfig
    from asyncrl.engine.data_plane.base import DataPlane
    from asyncrl.engine.events.log import EventLog
    from asyncrl.engine.events.progress import Progress
    from asyncrl.engine.events.types import RunStarted
    from asyncrl.engine.loop.controller import Controller
    from asyncrl.engine.records.ending import Ending


def train(
    config: ConfigOption = "default",
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
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the values, and stop.")] = False,
) -> None:
    """Train a model. Exit code 0: done; 1: failed; 2: bad input; 130, 143, 129: ended by Ctrl-C, SIGTERM, SIGHUP."""
    options = [
        ("--max-staleness", "rollout.max_staleness", max_staleness),
        ("--steps", "run.steps", steps),
        ("--seed", "run.seed", seed),
        ("--run-dir", "run.directory", run_dir),
        ("--runtime", "run.runtime", runtime),
        ("--record", "run.record", record),
    ]
    loaded, task = resolve(config, options, filter_ or [], set_ or [])
    if dry_run:
        typer.echo(describe(loaded))
        return
    directory = _make_directory(loaded)
    raise typer.Exit(_train(loaded, task, directory))


def _make_directory(loaded: Loaded) -> Path:
    given = loaded.config.run.directory
    path = Path(given) if given else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if given and (path / "events.jsonl").exists():
        fail(f"{loaded.sources['run.directory']} is {given!r}, which holds a run already; name a new folder")
    number = 1
    while not given and path.exists():
        number += 1
        path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{number}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{loaded.sources['run.directory']}: cannot make the folder {path}: {error}")
    return path


def _train(loaded: Loaded, task: PreparedTask, directory: Path) -> int:
    import psutil
    import structlog
    from rich.console import Console

    from asyncrl.engine.cli.logs import log_to
    from asyncrl.engine.cli.output import standard_output
    from asyncrl.engine.cli.run_files import RunFiles
    from asyncrl.engine.cli.signals import EndSignals
    from asyncrl.engine.cli.view import View, final_lines
    from asyncrl.engine.errors import TraceError
    from asyncrl.engine.events.alarms import Alarms
    from asyncrl.engine.events.bias_alarm import BiasAlarm
    from asyncrl.engine.events.ledger import Ledger
    from asyncrl.engine.events.log import FILE_NAME, EventLog, Fold
    from asyncrl.engine.events.progress import Progress
    from asyncrl.engine.events.summary import Ends, summarise_log

    console = Console(file=cast(IO[str], standard_output()))
    rollout = loaded.config.rollout
    console.print(
        f"asyncrl train: task {loaded.config.task.name}, runtime {loaded.config.run.runtime}, max_staleness "
        f"{rollout.max_staleness}, run-ahead {loaded.config.run_ahead_groups} groups, max_publish_lag "
        f"{loaded.config.max_publish_lag}, seed {loaded.config.run.seed}, in {directory}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    # Looked up at each warning: where logs go is settled below.
    alarms = Alarms(warn=lambda message, **figures: structlog.get_logger().warning(message, **figures))
    ledger, progress, ends = Ledger(), Progress(loaded.config.run.reward_window, alarms), Ends()
    view = View(
        ledger=ledger, progress=progress, console=console, clock=time.monotonic, bias_warning=rollout.bias_warning
    )
    run = _Run(loaded, task, directory, progress, view)
    files = RunFiles(directory, run.end)
    with EndSignals(run.interrupt) as signals:
        with ExitStack() as stack:
            try:
                stack.enter_context(log_to(directory / "log.jsonl", lost=files.lose))
                alarm = BiasAlarm(progress.length_bias, below=rollout.bias_warning, warn=structlog.get_logger().warning)
                folds: list[Fold] = [ledger, progress, ends, alarm]
                path = directory / FILE_NAME
                events = EventLog(
                    clock=time.monotonic, wall=time.time, folds=folds, path=path, threaded=True, on_failure=files.lose
                )
            except (TraceError, OSError) as error:
                # Another process began a run in this folder at the same moment; or nothing can be written there.
                fail(str(error))
            ending = run.run(events, signals.install)
            events.close()
        summary = summarise_log(
            ledger, progress, ends, started_wall=psutil.Process().create_time(), bias_warning=rollout.bias_warning
        )
        ending = files.finish(ending, summary, run.filter_state)
    for line in final_lines(summary, str(directory)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    with suppress(OSError):  # A terminal that is gone.
        files.explain(ending)
    return ending.code


class _Run:
    """Ties world, controller, view and what ends a run from outside together for one run."""

    def __init__(self, loaded: Loaded, task: PreparedTask, directory: Path, progress: Progress, view: Any) -> None:
        self._loaded = loaded
        self._task = task
        self._directory = directory
        self._progress = progress
        self._view = view
        self._controller: Controller | None = None
        self._asked: Ending | None = None
        self._tell: Callable[[], Any] = lambda: None
        self.keys_left: int | None = None
        self.filter_stats: dict[str, Any] = {}
        self.filter_state: dict[str, Any] = {}

    def interrupt(self, number: signal.Signals) -> None:
        """Finish the step, settle, and end, for a signal."""
        from asyncrl.engine.cli.signals import exit_code
        from asyncrl.engine.records.ending import INTERRUPTED, Ending

        by = "" if number == signal.SIGINT else f" by {number.name}"
        self.end(Ending(exit_code(number), f"{INTERRUPTED}{by}"))

    def end(self, ending: Ending) -> None:
        """End in order, now or once the loop runs; from any thread, and from a signal's handler."""
        self._asked = self._asked or ending
        self._tell()

    def run(self, events: EventLog, take_signals: Callable[[], None]) -> Ending:
        """Run to an ending, and log it; `take_signals` puts handlers of signals back in place."""
        import anyio

        from asyncrl.engine.events.types import RunEnded
        from asyncrl.engine.records.ending import INTERRUPTED, Ending, failure, first_cause

        try:
            ending = anyio.run(self._go, events, take_signals)
        except KeyboardInterrupt:  # A user's code took our handler away.
            ending = Ending(130, INTERRUPTED)
        except BaseException as error:  # The process's edge: such as SystemExit, which leaves the loop at once.
            ending = failure(first_cause(error))
        events.append(
            RunEnded(
                code=ending.code,
                reason=ending.reason,
                keys_left=self.keys_left,
                filters=self.filter_stats,
            )
        )
        return ending

    async def _go(self, events: EventLog, take_signals: Callable[[], None]) -> Ending:
        import asyncio

        import anyio

        from asyncrl.engine.records.ending import Ending, failure, first_cause

        ending: Ending | None = None
        try:
            async with anyio.create_task_group() as tasks:
                loop = asyncio.get_running_loop()
                obey = partial(self._obey, tasks.cancel_scope)
                self._tell = partial(loop.call_soon_threadsafe, obey)
                obey()
                tasks.start_soon(self._view.run)
                ending = await self._in_world(events, take_signals)
                tasks.cancel_scope.cancel()
        except Exception as error:  # The process's edge: a world that did not start or stop.
            ending = failure(first_cause(error))
        finally:
            self._tell = lambda: None
        return ending or self._asked or Ending(1, "the run was cancelled")

    def _obey(self, scope: anyio.CancelScope) -> None:
        """Do what `end` asked for, in the loop."""
        if self._asked is not None:
            if self._controller is None:
                scope.cancel()
            else:
                self._controller.interrupt(self._asked)

    async def _in_world(self, events: EventLog, take_signals: Callable[[], None]) -> Ending:
        import anyio
        import structlog

        from asyncrl.engine.data_plane.observe import ObservedPlane
        from asyncrl.engine.deployment import PARTITION
        from asyncrl.engine.errors import FilterError
        from asyncrl.engine.loop.controller import Controller
        from asyncrl.engine.records.ending import failure
        from asyncrl.filters import build_chain

        config = self._loaded.config
        async with AsyncExitStack() as stack:
            if config.run.runtime == "ray":
                from asyncrl.engine.lifecycle.process_env import prepare

                prepare(max(config.collector.threads, config.trainer.threads))
                events.append(_run_started(config))
                from asyncrl.engine.lifecycle.ray_runtime import ray_cluster, ray_deployment

                async with anyio.create_task_group() as starting:
                    starting.start_soon(_keep, take_signals)
                    await stack.enter_async_context(ray_cluster())
                    starting.cancel_scope.cancel()
                take_signals()
                world = await stack.enter_async_context(ray_deployment(config, self._task))
            else:
                from asyncrl.engine.lifecycle.local import local_deployment

                events.append(_run_started(config))
                world = await stack.enter_async_context(local_deployment(config, self._task))
            plane = ObservedPlane(world.plane, clock=time.monotonic)
            owner = f"driver-{uuid.uuid4().hex[:8]}"
            chain = build_chain(config.filters, min_live=config.rollout.min_live, clock=time.monotonic)
            self._controller = Controller(
                config,
                replace(world, plane=plane, owner=owner, record=self._recorder(plane)),
                chain=chain,
                events=events,
                progress=self._progress,
                clock=time.monotonic,
            )
            self._view.watch(self._controller)
            if self._asked is not None:  # While the world was built, in one go.
                self._controller.interrupt(self._asked)
            ending = await self._controller.run()
            self.keys_left = await self._controller.keys_left(PARTITION)
            structlog.get_logger().info(
                "data plane calls of the driver",
                **{name: asdict(stats) for name, stats in plane.snapshot().items()},
            )
            self.filter_stats = {name: stats.summary() for name, stats in chain.stats.items()}
            try:
                self.filter_state = {
                    "filters": chain.state_dict(),
                    "statistics": self._controller.core.judged.state_dict(),
                }
            except FilterError as error:
                ending = ending if ending.error is not None else failure(error)
            return ending

    def _recorder(self, plane: DataPlane) -> Callable[[int, Sequence[str]], Awaitable[None]] | None:
        """Return what keeps the tensors of each step, if the configuration asks for it."""
        if self._loaded.config.run.record == "events":
            return None
        from asyncrl.engine.aio.blocking import in_place, in_thread
        from asyncrl.engine.loop.stages import later_columns
        from asyncrl.engine.trace.tensors import TensorRecorder

        # In one process a thread would make the order of events a matter of luck.
        blocking = in_place if self._loaded.config.run.runtime == "local" else in_thread
        columns = later_columns(self._loaded.config.trainer)
        return TensorRecorder(plane, self._directory, blocking=blocking, columns=columns).record


async def _keep(take_signals: Callable[[], None]) -> None:
    """Take signals again and again while Ray starts: nothing tells when it has taken one, and seconds may follow."""
    import anyio

    while True:
        take_signals()
        await anyio.sleep(0.02)


def _run_started(config: RunConfig) -> RunStarted:
    """Say what runs; after `prepare`, since it imports torch."""
    import psutil

    from asyncrl.engine.events.types import SCHEMA, RunStarted
    from asyncrl.engine.lifecycle.parts import cost_model

    cost = cost_model(config)
    return RunStarted(
        schema=SCHEMA,
        config=config.model_dump(),
        software=_software(),
        process_wall=psutil.Process().create_time(),
        cost=asdict(cost) if cost else None,
    )


def _software() -> dict[str, str]:
    from importlib.metadata import version

    from asyncrl import __version__

    names = ("torch", "ray", "transferqueue", "transformers")
    return {"asyncrl": __version__, "python": sys.version.split()[0], **{name: version(name) for name in names}}
