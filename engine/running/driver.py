"""Drives one run: a deployment, the controller in it, and what ends both from outside.

Invariant: `run` returns an ending, whatever happens, and has logged it.
"""

import asyncio
import hashlib
import json
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import structlog

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking, in_place, in_thread
from asyncrl.engine.aio.call_in import CallIn, call_here
from asyncrl.engine.checkpoint.state import write_run
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.observe import ObservedPlane
from asyncrl.engine.deployment import EVALUATION, PARTITION, Deployment
from asyncrl.engine.errors import FilterError
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import SCHEMA, RunEnded, RunStarted
from asyncrl.engine.loop.checkpointer import Checkpointer, CheckpointSettings
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.model_saver import ModelSaver, SaverSettings
from asyncrl.engine.loop.unrestored import settle_unrestored
from asyncrl.engine.records.ending import INTERRUPTED, Ending, failure, first_cause
from asyncrl.engine.running.host import Host
from asyncrl.engine.running.process_state import torch_threads_restored
from asyncrl.engine.running.resume import Resumption
from asyncrl.engine.running.signals import exit_code
from asyncrl.engine.running.threads import is_main_thread
from asyncrl.filters import BaseRolloutFilter, Chain, build_chain
from asyncrl.filters.load import object_name, with_objects
from asyncrl.filters.taggers import Tagger


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run, checked: `filters` are objects to be put into the configured chain.

    `resumption` says where a resumed run goes on; None for a new run.
    """

    config: RunConfig
    task: PreparedTask
    directory: Path
    filters: Sequence[BaseRolloutFilter] = ()
    resumption: Resumption | None = None

    @property
    def taggers(self) -> dict[str, Tagger]:
        """What the filter objects ask of the collectors, which know the configured filters themselves."""
        return build_chain(self.filters, min_live=self.config.rollout.min_live).taggers

    def build_chain(self, clock: Callable[[], float]) -> Chain:
        """Build the run's chain, filter objects in it."""
        filters = with_objects(self.config.filters, self.filters)
        return build_chain(filters, min_live=self.config.rollout.min_live, clock=clock)

    def recorded_config(self) -> dict[str, Any]:
        """Return the configuration for the log, where a filter object is an entry `module:Class`."""
        config = self.config.model_dump()
        if self.filters:
            chain = with_objects(self.config.filters, self.filters)
            config["filters"] = [{"name": object_name(f)} if isinstance(f, BaseRolloutFilter) else f for f in chain]
        return config

    @property
    def config_digest(self) -> str:
        """The SHA-256 of the configuration as it is logged."""
        return hashlib.sha256(json.dumps(self.recorded_config(), sort_keys=True, default=str).encode()).hexdigest()


class Driver:
    """One run. `interrupt` and `end` may be called from any thread; `run`, once.

    `ledger` and `progress` are folds of the log that `run` is given.
    """

    def __init__(self, order: Order, ledger: Ledger, progress: Progress, host: Host) -> None:
        self._order = order
        self._ledger = ledger
        self._progress = progress
        self._host = host
        self._chain = order.build_chain(time.monotonic)
        self._controller: Controller | None = None
        self._asked: Ending | None = None
        self._tell: Callable[[], Any] = lambda: None
        self._let_go: Callable[[], Any] = lambda: None
        self._keys_left: int | None = None
        self._filter_stats: dict[str, Any] = {}
        self._skipped: dict[str, int] | None = None
        self._filter_state: dict[str, Any] = {}
        self._saver: ModelSaver | None = None
        self._checkpoints: Checkpointer | None = None
        self._is_log_begun = False
        self.speaks = order.resumption is None
        """False while a run that is resumed reads its log, of which everything was told before."""

    @property
    def filter_state(self) -> Mapping[str, Any]:
        """The state of the filters and the statistics at the end of the run."""
        return self._filter_state

    def interrupt(self, number: signal.Signals) -> None:
        """Finish the step, settle, and end, for a signal."""
        by = "" if number == signal.SIGINT else f" by {number.name}"
        self.end(Ending(exit_code(number), f"{INTERRUPTED}{by}"))

    def end(self, ending: Ending) -> None:
        """End in order, now or once the loop runs; from any thread, and from a signal's handler."""
        self._asked = self._asked or ending
        self._tell()

    def kill(self, code: int) -> None:
        """Let everything go where it is, and end as the host does by a second signal."""
        self._let_go()
        self._host.kill(code)

    def run(self, events: EventLog, take_signals: Callable[[], None], call_in: CallIn = call_here) -> Ending:
        """Run to an ending, and log it; `take_signals` puts handlers of signals back in place.

        `call_in` makes calls in the thread that waits for this one.
        """
        try:
            ending = anyio.run(self._go, events, partial(call_in, take_signals), call_in)
        except KeyboardInterrupt:  # A second signal, or a user's code took our handler away.
            ending = self._asked or Ending(130, INTERRUPTED)
        except BaseException as error:  # The process's edge: such as SystemExit, which leaves the loop at once.
            ending = failure(first_cause(error))
        self._close_history(events)
        events.append(
            RunEnded(
                code=ending.code,
                reason=ending.reason,
                keys_left=self._keys_left,
                filters=self._filter_stats,
                model=self._saver.summary() if self._saver is not None else None,
                skipped=self._skipped,
            )
        )
        return ending

    def _close_history(self, events: EventLog) -> None:
        """Leave no group of a checkpoint without a fate, however early the run that goes on from it failed."""
        resumption = self._order.resumption
        if resumption is None:
            return
        if not self._is_log_begun:  # Its end would else stand alone, without a word of what was done before.
            self._log_resumed(events, resumption)
        if resumption.saved is not None:
            settle_unrestored(resumption.saved, self._ledger, events)

    async def _go(self, events: EventLog, take_signals: Callable[[], None], call_in: CallIn) -> Ending:
        ending: Ending | None = None
        try:
            async with anyio.create_task_group() as tasks:
                loop = asyncio.get_running_loop()
                obey = partial(self._obey, tasks.cancel_scope)
                self._tell = partial(loop.call_soon_threadsafe, obey)
                self._let_go = partial(loop.call_soon_threadsafe, tasks.cancel_scope.cancel)
                obey()
                tasks.start_soon(self._show)
                ending = await self._control(events, take_signals, call_in)
                tasks.cancel_scope.cancel()
        except Exception as error:  # The process's edge: a deployment that did not start or stop.
            ending = failure(first_cause(error))
        finally:
            self._tell = self._let_go = lambda: None
        return ending or self._asked or Ending(1, "the run was cancelled")

    def _obey(self, scope: anyio.CancelScope) -> None:
        """Do what `end` asked for, in the loop."""
        if self._asked is not None:
            if self._controller is None:
                scope.cancel()
            else:
                self._controller.interrupt(self._asked)

    async def _show(self) -> None:
        try:
            await self._host.show()
        except Exception as error:  # The host's edge: the run settles all the same.
            self.end(failure(error))

    async def _control(self, events: EventLog, take_signals: Callable[[], None], call_in: CallIn) -> Ending:
        """Run the controller in a deployment, and keep what it leaves."""
        async with self._deployed(events, take_signals, call_in) as deployment:
            plane = ObservedPlane(deployment.plane, clock=time.monotonic)
            controller = self._controller = self._build_controller(deployment, plane, events)
            self._host.watch(controller)
            if self._asked is not None:  # While the deployment was built, in one go.
                controller.interrupt(self._asked)
            resumption = self._order.resumption
            ending = await controller.run(resumption.saved if resumption is not None else None)
            partitions = (PARTITION,) if deployment.evaluation is None else (PARTITION, EVALUATION)
            self._keys_left = await controller.keys_left(*partitions)
            structlog.get_logger().info(
                "data plane calls of the driver",
                **{name: asdict(stats) for name, stats in plane.snapshot().items()},
            )
            self._skipped = dict(controller.skipped) or None
            chain = self._chain
            self._filter_stats = {name: stats.summary() for name, stats in chain.stats.items()}
            try:
                self._filter_state = {
                    "filters": chain.state_dict(),
                    "statistics": controller.core.judged.state_dict(),
                }
            except FilterError as error:
                ending = ending if ending.error is not None else failure(error)
            return ending

    def _build_controller(self, deployment: Deployment, plane: DataPlane, events: EventLog) -> Controller:
        owner, order = f"driver-{uuid.uuid4().hex[:8]}", self._order
        if order.config.run.save_model and deployment.holder is not None:
            settings = SaverSettings.of(order.config, order.directory.absolute(), order.config_digest)
            self._saver = ModelSaver(settings, deployment.holder, self._progress)
        deployment = replace(deployment, plane=plane, owner=owner, record=self._recorder(plane))
        if deployment.states:
            self._checkpoints = self._build_checkpoints(deployment, events)
        return Controller(
            order.config,
            deployment,
            chain=self._chain,
            events=events,
            progress=self._progress,
            clock=time.monotonic,
            saver=self._saver,
            checkpoints=self._checkpoints,
        )

    def _build_checkpoints(self, deployment: Deployment, events: EventLog) -> Checkpointer:
        order = self._order
        run = write_run(order.recorded_config(), digest=order.config_digest, software=_software())
        settings = CheckpointSettings.of(order.config, order.directory.absolute(), run=run)
        return Checkpointer(settings, deployment, events=events, blocking=self._blocking)

    @property
    def _blocking(self) -> Blocking[Any]:
        # In one process a thread would make the order of events a matter of luck.
        return in_place if self._order.config.run.runtime == "local" else in_thread

    @asynccontextmanager
    async def _deployed(
        self, events: EventLog, take_signals: Callable[[], None], call_in: CallIn
    ) -> AsyncIterator[Deployment]:
        """Start what the configuration asks for; the process is as it was before when the context ends."""
        order, config = self._order, self._order.config
        with ExitStack() as restored:
            async with AsyncExitStack() as stack:
                if config.run.runtime == "ray":
                    from asyncrl.engine.lifecycle.orphans import end_orphans
                    from asyncrl.engine.lifecycle.process_env import cluster_address, prepared

                    address = cluster_address(config)
                    threads = max(config.collector.threads, config.trainer.threads)
                    restored.enter_context(prepared(threads, joins=address))
                    if orphans := end_orphans():
                        structlog.get_logger().warning("processes of a run that was killed were ended", pids=orphans)
                    self._log_start(events)
                    from asyncrl.engine.lifecycle.joined import joined_cluster
                    from asyncrl.engine.lifecycle.ray_runtime import ray_cluster, ray_deployment

                    directory = order.directory.absolute()
                    cluster = ray_cluster() if address is None else joined_cluster(address, config, directory=directory)
                    async with anyio.create_task_group() as starting:
                        starting.start_soon(_keep, take_signals)
                        places = await stack.enter_async_context(cluster)
                        starting.cancel_scope.cancel()
                    take_signals()
                    deployment = ray_deployment(config, order.task, taggers=order.taggers, places=places)
                else:
                    from asyncrl.engine.lifecycle.local import local_deployment

                    restored.enter_context(torch_threads_restored())
                    self._log_start(events)
                    deployment = local_deployment(config, order.task, taggers=order.taggers, call_in=call_in)
                    if order.task.blocks and not call_in(is_main_thread):
                        structlog.get_logger().warning(
                            "no score can be ended after collector.score_timeout_s: that takes the main thread, and "
                            "this run was started in another"
                        )
                yield await stack.enter_async_context(deployment)

    def _log_start(self, events: EventLog) -> None:
        """Say what runs, or goes on; once the environment is set, since it imports torch."""
        resumption = self._order.resumption
        if resumption is not None:
            self._log_resumed(events, resumption)
            return
        from asyncrl.engine.lifecycle.parts import cost_model

        cost = cost_model(self._order.config)
        events.append(
            RunStarted(
                schema=SCHEMA,
                config=self._order.recorded_config(),
                software=_software(),
                process_wall=self._host.began_wall,
                cost=asdict(cost) if cost else None,
                age_reasons=self._chain.age_reasons,
            )
        )

    def _log_resumed(self, events: EventLog, resumption: Resumption) -> None:
        self._is_log_begun = True
        resumption.warn()
        events.resume(
            resumption.checkpoint,
            after=resumption.after,
            config=self._order.recorded_config(),
            attempt=resumption.attempt,
            cause=resumption.cause,
        )
        self.speaks = True

    def _recorder(self, plane: DataPlane) -> Callable[[int, Sequence[str]], Awaitable[None]] | None:
        """Return what keeps the tensors of each step, if the configuration asks for it."""
        config = self._order.config
        if config.run.record == "events":
            return None
        from asyncrl.engine.loop.stages import later_columns
        from asyncrl.engine.trace.tensors import TensorRecorder

        columns = later_columns(config.trainer)
        return TensorRecorder(plane, self._order.directory, blocking=self._blocking, columns=columns).record


async def _keep(take_signals: Callable[[], None]) -> None:
    """Take signals again and again while Ray starts: nothing tells when it has taken one, and seconds may follow."""
    while True:
        take_signals()
        await anyio.sleep(0.02)


def _software() -> dict[str, str]:
    from asyncrl import __version__

    names = ("torch", "ray", "transferqueue", "transformers")
    return {"asyncrl": __version__, "python": sys.version.split()[0], **{name: version(name) for name in names}}
