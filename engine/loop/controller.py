"""The controller: one loop from prompts to weights, in the driver's process.

    prompts ──▶ dispatcher ──grants──▶ collectors ──rows──▶ data plane
                  ▲ capacity               │ messages           │ claims
                  │                        ▼                    ▼
    run-ahead ◀── publisher ◀─version── listener            _assemble (front end: bound, chain)
                  ▲                                             │ batch
                  └──────── weights ─────── _train ◀────────────┘
                                            (plan, ranks, settle)

dispatcher  produces grants; waits for run-ahead capacity, which publishing and settling give back.
listener    one per actor; produces put notices, failures and acknowledgements; waits on the long poll.
elasticity  has collectors join and leave; waits for nodes that come, or are drained (elasticity.py).
supervisor  has a dead collector replaced, and its groups issued again; waits for deaths (supervisor.py).
_assemble   produces batches; waits for put notices, and for _train to take the last batch.
_train      produces versions; waits for a batch, and for the publish lag to be within its bound.
_publish    produces served versions; waits for every generator's acknowledgement.
time slices the ranks and the generators have their devices in turns, if that is asked for (time_slices.py).
saver       produces folders of saved models; waits for rank 0, beside the next steps.
checkpoints produces folders from which a run can be resumed; waits for the ranks (checkpointer.py).
evaluator   produces scores of versions, on a collector of its own that no publish reaches; waits for nobody here.

What happens to a batch, in which order, is in core.py; this file gives it tasks, real time and an ending. All of it
is written against anyio with clock and I/O injected, so it runs on Ray, in one process and under virtual time alike.
"""

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import Deployment
from asyncrl.engine.errors import AsyncRLError, DataPlaneDown, DataPlaneSilent
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.loop import rank_start
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.batch import Batch, TrainedBatch
from asyncrl.engine.loop.blame import first_death
from asyncrl.engine.loop.checkpointer import Checkpointer
from asyncrl.engine.loop.collectors import Collectors
from asyncrl.engine.loop.core import Core
from asyncrl.engine.loop.dispatcher import Dispatcher
from asyncrl.engine.loop.elasticity import Elasticity
from asyncrl.engine.loop.evaluator import Evaluator, Schedule
from asyncrl.engine.loop.examiner import Examiner, ExaminerSettings
from asyncrl.engine.loop.handover import Handover
from asyncrl.engine.loop.listener import Listener
from asyncrl.engine.loop.model_saver import ModelSaver
from asyncrl.engine.loop.position import Position
from asyncrl.engine.loop.prompt_source import PromptSource
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.recall import Recall
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.loop.saved import Saved
from asyncrl.engine.loop.supervisor import Supervisor
from asyncrl.engine.loop.time_slices import SliceSettings, TimeSlices
from asyncrl.engine.loop.watchdog import Watchdog, longest_wait_s
from asyncrl.engine.records import PromptStream
from asyncrl.engine.records.ending import DATA_EXHAUSTED, INTERRUPTED, LIMIT_STEPS, Ending, failure, first_cause
from asyncrl.engine.records.scores import Scores
from asyncrl.filters import Chain

log = structlog.get_logger()

# Without the data plane nothing can be settled any more, so collectors get only this long to stop.
_DOWN_STOP_S = 2.0


class Controller:
    """One run of one configuration in a started deployment. `events` must have `progress` among its folds."""

    def __init__(
        self,
        config: RunConfig,
        deployment: Deployment,
        *,
        chain: Chain,
        events: EventLog,
        progress: Progress,
        clock: Callable[[], float],
        saver: ModelSaver | None = None,
        checkpoints: Checkpointer | None = None,
    ) -> None:
        self._config = config
        self._saver = saver
        self._checkpoints = checkpoints
        self._deployment = deployment
        self._events = events
        self._progress = progress
        self._clock = clock
        given = deployment.prompts
        count = given.prompts if isinstance(given, PromptStream) else len(given)
        retirement = Retirement(config.task.retire_after, prompts=count)
        self._prompts = PromptSource(deployment.prompts, config, retirement)
        self.core = core = Core(
            config,
            deployment,
            chain=chain,
            log=events,
            progress=progress,
            clock=clock,
            prompts=self._prompts,
            run_ahead=config.run_ahead_groups,
        )
        self._handover = Handover(core.take, core.groups.changed)
        self._collectors = collectors = Collectors(deployment.collectors)
        names, exact = [collector.name for collector in deployment.collectors], config.rollout.max_staleness == 0
        balance = Balance(names, exact=exact)
        events.add(balance)
        self.dispatcher = Dispatcher(
            config,
            collectors,
            self._prompts,
            groups=core.groups,
            versions=core.versions,
            balance=balance,
            held_up=lambda: self._handover.waiting,
        )
        self._position = Position(core, self._prompts, retirement, self.dispatcher, balance)
        self._recall = Recall(collectors, groups=core.groups, balance=balance, now=lambda: events.now)
        self.publisher = Publisher(
            config.trainer, collectors, deployment.ranks[0], versions=core.versions, events=events, clock=clock
        )
        self._slices = TimeSlices(
            SliceSettings.of(config),
            collectors,
            deployment.ranks,
            restarter=deployment.restarter,
            changed=core.groups.changed,
        )
        self._supervisor = Supervisor(
            config.supervision,
            collectors,
            self._slices.restarter,
            deployment.roster,
            core=core,
            publisher=self.publisher,
            events=events,
        )
        self._listener = Listener(
            config,
            groups=core.groups,
            versions=core.versions,
            retirement=retirement,
            engine_uses=core.engine_uses,
            put_traffic=core.put_traffic,
            deaths=self._supervisor.deaths,
            events=events,
        )
        self._elasticity = self._build_elasticity()
        self._evaluator = self._build_evaluator()
        self._watchdog = Watchdog(longest_wait_s(config), self._who_waits)
        events.add(self._watchdog)
        self._works = False
        self._ending: Ending | None = None

    async def run(self, saved: Saved | None = None) -> Ending:
        """Run to an ending, from a checkpoint if one is given, and leave nothing of the run behind.

        Only cancellation from outside is raised.
        """
        # What evaluates goes on beside training, and beyond its end.
        async with anyio.create_task_group() as evaluating:
            if self._evaluator is not None:
                self._evaluator.start(evaluating)
            ending = await self._train_to_an_end(saved)
            if self._evaluator is not None:
                await self._evaluator.finish(ending, self.core.versions.trainer)
            evaluating.cancel_scope.cancel()
        if self._saver is None:
            return ending
        version, stop_s = self.core.versions.trainer, self._config.supervision.stop_timeout_s
        return await self._saver.finish(ending, version=version, stop_s=stop_s)

    async def _train_to_an_end(self, saved: Saved | None) -> Ending:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watchdog.watch)
                await self._start(tasks, saved)
                await self._work(tasks)
                if self._saver is not None:
                    await self._saver.written()
                tasks.cancel_scope.cancel()
        except Exception as error:  # The run's edge: whatever came first is the run's ending.
            self._supervisor.close()
            self._supervisor.deaths.among(error)
            self._ending = failure(await self._blamed(error))
        self._supervisor.close()
        ending = self._ending or Ending(1, "the run was cancelled")
        self._prompts.close()
        if self._checkpoints is not None and self._works:
            version = self.core.versions.trainer
            await self._checkpoints.finish(ending, self._position.state, self.core.groups, version=version)
        await self._stop()
        if ending.code == 0 and not self._progress.steps:
            where = self._progress.alarms.in_vain()
            ending = Ending(1, f"{ending.reason}, but no step was trained{f': of the {where}' if where else ''}")
        return ending

    async def _blamed(self, error: Exception) -> BaseException:
        """Return what a run failed of; where actors are processes, a death that the error may follow from."""
        restarter = self._deployment.restarter
        if restarter is None:
            return first_cause(error)
        actors = [*self._deployment.rank_actors, *(member.handle for member in self._collectors.all())]
        blamed = await first_death(error, actors, self._deployment.plane)
        self._supervisor.deaths.among(blamed)
        for name in self._supervisor.deaths.names:
            # It may only hang: what is still asked of it would be waited for, and it may wake up and go on.
            restarter.kill(name)
        return blamed

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many records of data sets were left out, by reason."""
        return self._prompts.skipped

    @property
    def waits_for(self) -> str:
        """What trainer and collectors wait for, in words."""
        if self._saver is not None and self._saver.finishing:
            return "the last model to be saved"
        if self._checkpoints is not None and self._checkpoints.finishing:
            return "the last checkpoint to be written"
        if self._evaluator is not None and self._evaluator.finishing:
            return "the last evaluation"
        groups = self.core.groups.statistics()
        collectors = "prompts" if groups.run_ahead < groups.run_ahead_limit else "capacity"
        trainer = self.core.trainer_waits_for if self._works else "start"
        restarted = "".join(f", {name} is restarted" for name in self._supervisor.being_restarted)
        return f"trainer for {trainer}, collectors for {'generation' if groups.in_flight else collectors}{restarted}"

    def _who_waits(self) -> str:
        groups, versions = self.core.groups, self.core.versions
        now = groups.statistics()
        return (
            f"{self.waits_for}; {groups.awaited()} in flight, {now.buffered} buffered, run-ahead "
            f"{now.run_ahead}/{now.run_ahead_limit}; the trainer is at version {versions.trainer}, and "
            f"{', '.join(versions.behind) or 'no collector'} at {versions.published}"
        )

    def interrupt(self, ending: Ending | None = None) -> None:
        """Finish the step that runs, settle, and end as `ending` says; without one, with code 130."""
        if self._evaluator is not None:
            self._evaluator.give_up()
        self._ending = self._ending or ending or Ending(130, INTERRUPTED)
        self._prompts.close()
        self.core.front_end.close()

    async def keys_left(self, *partitions: str) -> int | None:
        """Count the keys in the data plane; None if it no longer answers."""
        if self._plane_is_down:
            return None  # Its answer would be waited for as long again.
        plane = self._deployment.plane
        try:
            return sum([len(await plane.keys(partition)) for partition in partitions])
        except (AsyncRLError, OSError):
            return None

    async def _restore(self, saved: Saved) -> None:
        """Bring rows, registers and ranks to where they were at a checkpoint."""
        fence = await saved.put_rows(self._deployment)
        self._position.restore(saved.state, fence=fence)
        await rank_start.load(self._deployment, saved, limit_s=self._config.checkpoint.timeout_s)
        if self._checkpoints is not None:
            self._checkpoints.resumed(saved.version)
        if self._saver is not None:
            self._saver.resumed(saved.version)
        log.info("resumed", checkpoint=str(saved.folder), version=saved.version)

    async def _start(self, tasks: TaskGroup, saved: Saved | None) -> None:
        """Listen to every actor, then bring all of them to version 0, or to that of a checkpoint."""
        deployment = self._deployment
        if deployment.rank_nodes:
            self.core.place_ranks(deployment.rank_nodes)
        tasks.start_soon(deployment.plane.watch)
        for actor in deployment.rank_actors:
            tasks.start_soon(self._listener.listen, actor)
        self._supervisor.attend(tasks, self._listener)
        await self._slices.train()
        if saved is not None:
            await self._restore(saved)
        elif self._config.trainer.sft_warm_up_steps:
            await rank_start.warm_up(deployment, self._config.trainer)
        await rank_start.compare_weights(deployment.ranks)
        version = self.core.versions.trainer
        weights = await deployment.ranks[0].weights()
        await self._slices.rest()
        await self.publisher.publish(version, weights)
        self.core.published(version)
        await self._slices.generate()
        if self._evaluator is not None:
            await self._evaluator.after_step(version)

    def _build_elasticity(self) -> Elasticity | None:
        roster, most = self._deployment.roster, self._config.cluster.max_collectors
        if roster is None or most is None:
            return None
        return Elasticity(
            roster,
            most,
            collectors=self._collectors,
            supervisor=self._supervisor,
            groups=self.core.groups,
            events=self._events,
        )

    def _build_evaluator(self) -> Evaluator | None:
        part = self._deployment.evaluation
        if part is None:
            return None
        examiner = Examiner(
            ExaminerSettings.of(self._config),
            part.collector,
            part.prompts,
            plane=self._deployment.plane,
            events=self._events,
            clock=self._clock,
            replace=self._supervisor.replace_evaluator if self._deployment.restarter is not None else None,
        )
        on_scored = _nobody_hears if self._saver is None else self._saver.note_scores
        return Evaluator(Schedule.of(self._config), part, examiner, events=self._events, on_scored=on_scored)

    async def _work(self, tasks: TaskGroup) -> None:
        self._works = True
        self._supervisor.open()
        out, trained = anyio.create_memory_object_stream[TrainedBatch](float("inf"))
        tasks.start_soon(self.dispatcher.run)
        tasks.start_soon(self._publish, trained)
        if self._elasticity is not None:
            tasks.start_soon(self._elasticity.run, tasks, self._listener)
        tasks.start_soon(self._assemble)
        tasks.start_soon(self.core.front_end.keep_claims)
        if self._config.rollout.stale_mode == "drop":  # The other modes train what is slow, or wait for it.
            tasks.start_soon(self._recall.run)
        if self._config.rollout.cancel_stale:
            tasks.start_soon(self.dispatcher.cancel_stale)
        await self._train(out, tasks)

    async def _assemble(self) -> None:
        """Assemble batches until the data ends or a limit is reached; the trainer finishes those that it was given."""
        core = self.core
        if core.front_end.waiting is not None:
            await self._handover.offer(core.front_end.waiting)
        reason = core.limit()  # A run that is resumed may have reached it before.
        while reason is None and (batch := await core.assemble()) is not None:
            if batch.kept:
                await self._handover.offer(batch)
            else:
                self._close(batch, None)
            reason = core.limit()
        self._end(reason or DATA_EXHAUSTED)
        self._handover.close()

    async def _train(self, out: MemoryObjectSendStream[TrainedBatch], tasks: TaskGroup) -> None:
        """Train what was assembled, until there is no more or a limit is reached."""
        core = self.core
        if core.limit() == LIMIT_STEPS:
            self._end(LIMIT_STEPS)
            return
        while not core.front_end.closed and (batch := await self._handover.next()) is not None:
            trained = await core.train(batch, have_device=self._slices.train)
            self._close(batch, trained)
            await self._slices.rest()
            if trained is not None:
                out.send_nowait(trained)
            else:
                await self._slices.generate()
            self._events.flush()
            if core.limit() == LIMIT_STEPS:
                self._end(LIMIT_STEPS)
                return
            if trained is not None and self._checkpoints is not None:
                await self._checkpoints.after_step(trained.version, self._position.state, core.groups, tasks)
            if trained is not None:
                await self._after_step(trained.version, tasks)

    async def _after_step(self, version: int, tasks: TaskGroup) -> None:
        """Copy what is to be evaluated or saved, before the ranks take the next batch."""
        evaluated = self._evaluator is not None and await self._evaluator.after_step(version)
        if self._saver is not None:
            await self._saver.after_step(version, tasks, evaluated=evaluated)

    def _close(self, batch: Batch, trained: TrainedBatch | None) -> None:
        self.core.close(batch, trained)
        # Only at the first of several such batches in a row; the alarms tell of the others.
        if trained is None and self._progress.alarms.learning.in_vain.batches == 1:
            log.warning(
                "a batch without anything to train is not a step",
                batch=batch.index,
                groups=len(batch.judged),
                drops=dict(batch.drops),
                masked_samples=dict(batch.masked),
            )

    async def _publish(self, trained: MemoryObjectReceiveStream[TrainedBatch]) -> None:
        async for batch in trained:
            await self.publisher.publish(batch.version, batch.weights)
            self.core.published(batch.version)
            await self._slices.generate()

    def _end(self, reason: str) -> None:
        self._ending = self._ending or Ending(0, reason)
        self._prompts.close()

    @property
    def _plane_is_down(self) -> bool:
        """Whether the run ends because its data plane has died, or no longer answers."""
        return self._ending is not None and isinstance(self._ending.error, DataPlaneDown | DataPlaneSilent)

    async def _stop(self) -> None:
        """Stop collectors, then settle all groups without a fate; each within a limit, even if actors are gone."""
        limit = _DOWN_STOP_S if self._plane_is_down else self._config.supervision.stop_timeout_s
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for member in self._collectors.all():
                    tasks.start_soon(_attempt, member.handle.stop, limit)
            await _attempt(self.core.groups.settle_rest, limit)
        self._events.flush()


async def _nobody_hears(version: int, scores: Scores) -> None:
    """Keep nothing of an evaluation beside its events."""


async def _attempt(call: Callable[[], Any], limit_s: float) -> None:
    """Await `call` within a limit, and only log its error: at the end of a run the first cause is known already."""
    try:
        with anyio.move_on_after(limit_s):
            await call()
    except Exception as error:  # The edge of the stop: this error came after the first cause.
        log.warning("could not stop in order", error=repr(error))
