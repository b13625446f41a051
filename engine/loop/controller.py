"""The controller: one loop from prompts to weights, in the driver's process.

    prompts ──▶ dispatcher ──grants──▶ collectors ──rows──▶ data plane
                  ▲ capacity               │ messages           │ claims
                  │                        ▼                    ▼
    run-ahead ◀── publisher ◀─version── _listen             _collect (front end: bound, chain)
                  ▲                                             │ batch
                  └──────── handle ──────── _train ◀────────────┘
                                            (plan, ranks, settle)

dispatcher  produces grants; waits for run-ahead capacity, which publishing and settling give back.
_listen     one an actor; produces put notices, failures and acknowledgements; waits on the long poll.
_collect    produces batches; waits for put notices, and for _train to take the last batch.
_train      produces versions; waits for a batch, and for the publish lag to be within its bound.
publisher   produces served versions; waits for every generator's acknowledgement.

All of it is written against anyio with clock and I/O injected, so it runs on Ray, in one process
and under virtual time alike.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import CONSUMER, PARTITION, Actor, CollectorHandle, Deployment, RankHandle
from asyncrl.engine.errors import ActorDied, AsyncRLError, DataPlaneDown, GenerationError, NothingLearned
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import Acknowledged, BatchGivenUp, BatchTaken
from asyncrl.engine.lifecycle.deaths import Deaths
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.dispatcher import Dispatcher
from asyncrl.engine.loop.front_end import Batch, FrontEnd
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.retirement import Retirement
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.step import Step
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import Grant
from asyncrl.engine.records.ending import (
    DATA_EXHAUSTED,
    INTERRUPTED,
    LIMIT_BATCHES,
    LIMIT_STEPS,
    REWARD_REACHED,
    Ending,
    failure,
    first_cause,
)
from asyncrl.engine.records.fate import CANCELLED, QUEUE_TIMEOUT
from asyncrl.engine.records.group import FAILED
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice, Served
from asyncrl.engine.weights.digest import Digest, check_equal
from asyncrl.filters import Chain

log = structlog.get_logger()

# With the data plane gone nothing can be put in order; collectors get this long to let go.
_DOWN_STOP_S = 2.0


class Controller:
    """One run of one configuration in a started world. `events` must have `progress` among its folds.

    `owner` names this driver's claims; two drivers on one data plane need two names. `record` is given
    the number and the keys of each step before it is trained.
    """

    def __init__(
        self,
        config: RunConfig,
        world: Deployment,
        *,
        chain: Chain,
        events: EventLog,
        progress: Progress,
        clock: Callable[[], float],
        owner: str = "driver",
        record: Callable[[int, Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._world = world
        self._events = events
        self._progress = progress
        self._clock = clock
        self.chain = chain
        self.versions = Versions(collector.name for collector in world.collectors)
        self.groups = Groups(
            plane=world.plane,
            partition=PARTITION,
            consumer=CONSUMER,
            log=events,
            run_ahead=RunAhead(config.run_ahead_groups),
        )
        self.retirement = Retirement(config.task.retire_after, prompts=len(world.prompts))
        balance = Balance((collector.name for collector in world.collectors), exact=config.rollout.max_staleness == 0)
        events.add(balance)
        self.dispatcher = Dispatcher(
            config,
            world.collectors,
            world.prompts,
            groups=self.groups,
            versions=self.versions,
            passes_over=self.retirement.passes_over,
            balance=balance,
            ended=lambda: self._ending is not None,
        )
        self.groups.on_stale = self.dispatcher.lost_to_age
        self.publisher = Publisher(
            config.trainer,
            world.collectors,
            groups=self.groups,
            versions=self.versions,
            events=events,
            clock=clock,
        )
        self.front_end = FrontEnd(
            plane=world.plane,
            groups=self.groups,
            chain=chain,
            versions=self.versions,
            log=events,
            partition=PARTITION,
            consumer=CONSUMER,
            owner=owner,
            groups_per_step=config.rollout.groups_per_step,
            max_staleness=config.rollout.max_staleness,
            stale_mode=config.rollout.stale_mode,
            gate_timeout_s=config.rollout.gate_timeout_s,
            seed=config.run.seed,
            poll_s=config.data_plane.poll_s,
            starve_timeout_s=config.supervision.starve_timeout_s,
            lease_s=config.data_plane.lease_s,
            more_may_come=self.dispatcher.more_may_come,
        )
        self._step = Step(
            config=config,
            chain=chain,
            progress=progress,
            ranks=world.ranks,
            cost=world.cost,
            groups=self.groups,
            versions=self.versions,
            log=events,
            clock=clock,
            statistics=self.front_end.statistics,
            record=record,
        )
        self.trainer_waits_for = "start"
        self._failed_in_a_row: dict[str, list[int | str]] = {}
        self._deaths = Deaths(events)
        self._ending: Ending | None = None

    async def run(self) -> Ending:
        """Run to an ending; never raises but for cancellation from outside. Nothing of the run stays behind."""
        try:
            async with anyio.create_task_group() as tasks:
                await self._start(tasks)
                await self._work(tasks)
                tasks.cancel_scope.cancel()
        except Exception as error:  # The run's edge: whatever came first is the run's ending.
            self._deaths.among(error)
            cause = first_cause(error)
            self._ending = failure(cause)
        ending = self._ending or Ending(1, "the run was cancelled")
        await self._stop(plane_is_down=isinstance(ending.error, DataPlaneDown))
        if ending.code == 0 and not self._progress.steps:
            where = self._progress.alarms.in_vain()
            ending = Ending(1, f"{ending.reason}, but no step was trained{f': of the {where}' if where else ''}")
        return ending

    @property
    def collectors_wait_for(self) -> str:
        if self.groups.in_flight:
            return "generation"
        return "prompts" if self.groups.run_ahead.free else "capacity"

    def interrupt(self, ending: Ending | None = None) -> None:
        """Finish the step that runs, settle, and end: as `ending` says, or with code 130."""
        self._ending = self._ending or ending or Ending(130, INTERRUPTED)
        self.front_end.close()

    async def keys_left(self, partition: str) -> int | None:
        """Count keys in the data plane; None when it no longer answers."""
        try:
            return len(await self._world.plane.keys(partition))
        except (AsyncRLError, OSError):
            return None

    async def _start(self, tasks: TaskGroup) -> None:
        """Listen to every actor, then bring all of them to version 0."""
        world, trainer = self._world, self._config.trainer
        tasks.start_soon(world.plane.watch)
        for actor in (*world.collectors, *world.ranks):
            tasks.start_soon(self._listen, actor)
        for collector in world.collectors:
            tasks.start_soon(self._run_collector, collector)
        if trainer.sft_warm_up_steps:
            async with anyio.create_task_group() as warming:
                for rank in world.ranks:
                    warming.start_soon(self._warm_up, rank)
        await self._compare_weights()
        await self.publisher.publish(0, await world.ranks[0].weights())

    async def _compare_weights(self) -> None:
        """Raise VersionError if a rank holds another version 0 than rank 0, which is published."""
        digests: dict[str, Digest] = {}

        async def ask(rank: RankHandle) -> None:
            digests[rank.name] = await rank.digest()

        async with anyio.create_task_group() as asking:
            for rank in self._world.ranks:
                asking.start_soon(ask, rank)
        check_equal({rank.name: digests[rank.name] for rank in self._world.ranks})

    async def _run_collector(self, collector: CollectorHandle) -> None:
        with self._deaths.of(collector.name):
            await collector.run()

    async def _warm_up(self, rank: Any) -> None:
        trainer = self._config.trainer
        loss = await rank.warm_up(
            self._world.examples,
            steps=trainer.sft_warm_up_steps,
            batch=trainer.sft_warm_up_batch,
            learning_rate=trainer.sft_warm_up_learning_rate,
        )
        log.info("warm-up done", rank=rank.name, loss=round(loss, 4))

    async def _work(self, tasks: TaskGroup) -> None:
        batch_out, batch_in = anyio.create_memory_object_stream[Batch](0)
        handle_out, handle_in = anyio.create_memory_object_stream[tuple[int, Any, Sequence[int]]](float("inf"))
        tasks.start_soon(self.dispatcher.run)
        tasks.start_soon(self.publisher.run, handle_in)
        tasks.start_soon(self._collect, batch_out)
        tasks.start_soon(self.front_end.keep_claims)
        if self._config.rollout.cancel_stale:
            tasks.start_soon(self.dispatcher.cancel_stale)
        await self._train(batch_in, handle_out)

    async def _listen(self, actor: Actor) -> None:
        limit = self._config.supervision.answer_timeout_s
        seen = 0
        while True:
            with self._deaths.of(actor.name):
                try:
                    with anyio.fail_after(limit):
                        messages = await actor.events(seen, limit / 3)
                except TimeoutError:
                    raise ActorDied(f"{actor.name} has answered nothing for {limit:g} s", actor=actor.name) from None
            for number, message in messages:
                seen = number
                self._hear(actor.name, message)

    def _hear(self, name: str, message: Message) -> None:
        match message:
            case PutNotice(group, seconds, errors):
                self._failed_in_a_row[name] = []
                self.retirement.succeeded(group.prompt)
                if errors:
                    failed = group.statuses.count(FAILED)
                    log.warning("samples failed", group=group.group, prompt=group.prompt, failed=failed, errors=errors)
                self.groups.arrive(group, seconds=seconds)
            case Served(version):
                self.versions.acknowledge(name, version)
                self._events.append(Acknowledged(generator=name, version=version))
            case GroupFailure(group, reason, error):
                grant = self.groups.in_flight.get(group)
                self.groups.fail(group, reason, error)
                if reason != CANCELLED and grant is not None:
                    self._count_failure(name, grant, reason, error)

    def _count_failure(self, name: str, grant: Grant, reason: str, error: str) -> None:
        """End the run if failures go on, but not for the sake of one prompt, which will be retired."""
        row = self._failed_in_a_row.setdefault(name, [])
        row.append(grant.prompt.id)
        collector = self._config.collector
        several = len(set(row)) > 1 or len(self._world.prompts) == 1
        if collector.on_error == "abort" or (len(row) >= collector.max_failures_in_a_row and several):
            raise GenerationError(
                f"{len(row)} groups in a row failed in {name}; the last, group {grant.group}, for {reason}:\n{error}"
            )
        if reason != QUEUE_TIMEOUT:
            self.retirement.failed(grant.prompt, reason, error)

    async def _collect(self, out: MemoryObjectSendStream[Batch]) -> None:
        run = self._config.run
        async with out:
            while run.batches is None or self.front_end.batches < run.batches:
                batch = await self.front_end.next_batch()
                if self.front_end.closed:
                    return
                if not batch.judged:
                    self._end(DATA_EXHAUSTED)
                    return
                if batch.kept:
                    self.dispatcher.batch_waits(True)
                    await out.send(batch)
                    self.versions.hand_over()
                    self.dispatcher.batch_waits(False)
                else:
                    self._no_step(batch)
                if self._reward_reached():
                    self._end(REWARD_REACHED)
                    return
            self._end(LIMIT_BATCHES)

    async def _train(
        self,
        batches: MemoryObjectReceiveStream[Batch],
        handles: MemoryObjectSendStream[tuple[int, Any, Sequence[int]]],
    ) -> None:
        run, trainer = self._config.run, self._config.trainer
        waited_from = self._clock()
        self.trainer_waits_for = "batch"
        async for batch in batches:
            if self.front_end.closed:
                return
            self._events.append(BatchTaken(batch=batch.index))
            self.trainer_waits_for = "publish"
            await self.versions.changed.wait_for(
                lambda: self.versions.publish_lag <= self._config.max_publish_lag,
                timeout_s=trainer.publish_timeout_s * trainer.publish_tries,
                what=lambda: (
                    f"publish lag over {self._config.max_publish_lag}, version {self.versions.published} published"
                ),
            )
            await self.front_end.hand_off(batch)
            self.trainer_waits_for = "step"
            published = await self._step.run(
                batch, waited_s=self._clock() - waited_from, poll_hits=self.front_end.poll_hits
            )
            if published is None:
                self._events.append(BatchGivenUp(batch=batch.index))
                self.versions.give_up()
                self._no_step(batch)
            else:
                handles.send_nowait((self.versions.trainer, published, batch.judged))
            self._events.flush()
            waited_from = self._clock()
            self.trainer_waits_for = "batch"
            if run.steps is not None and self.versions.trainer >= run.steps:
                self._end(LIMIT_STEPS)
                return

    def _no_step(self, batch: Batch) -> None:
        """Let a batch go that had nothing to train; NothingLearned when so many in a row had nothing."""
        self.groups.release(batch.judged)
        in_a_row, limit = self._progress.alarms.learning.in_vain.batches, self._config.run.max_empty_batches
        if in_a_row == 1:
            log.warning(
                "a batch without anything to train is no step",
                batch=batch.index,
                groups=len(batch.judged),
                drops=dict(batch.drops),
                masked_samples=dict(batch.masked),
            )
        if limit is not None and in_a_row >= limit:
            raise NothingLearned(
                f"{in_a_row} batches in a row had nothing to train, and run.max_empty_batches is {limit}. "
                f"Of the {self._progress.alarms.in_vain()}"
            )

    def _reward_reached(self) -> bool:
        run = self._config.run
        mean = self._progress.mean_of_last(run.reward_window)
        return run.stop_at_reward is not None and mean is not None and mean >= run.stop_at_reward

    def _end(self, reason: str) -> None:
        if self._ending is None:
            self._ending = Ending(0, reason)

    async def _stop(self, *, plane_is_down: bool) -> None:
        """Stop collectors, then settle what has no fate; bounded, also when actors are gone."""
        limit = _DOWN_STOP_S if plane_is_down else self._config.supervision.stop_timeout_s
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for collector in self._world.collectors:
                    tasks.start_soon(_attempt, collector.stop, limit)
            await _attempt(self.groups.settle_rest, limit)
        self._events.flush()


async def _attempt(call: Callable[[], Any], limit_s: float) -> None:
    """Await `call` as far as it goes: at the end of a run the first cause is known already."""
    try:
        with anyio.move_on_after(limit_s):
            await call()
    except Exception as error:  # The stop's edge: whatever it is, it came after the first cause.
        log.warning("could not stop in order", error=repr(error))
