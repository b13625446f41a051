"""`runtime: ray`: Ray, TransferQueue and one process per actor, all on this node's loopback.

Invariant: whatever was started here is gone when the context ends, however it ends.
"""

import importlib
import logging
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import ray
import structlog
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.aio.outbox import Numbered
from asyncrl.engine.data_plane.shared_memory import shared_directory
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.deployment import EVALUATOR, Deployment, EvaluationPart
from asyncrl.engine.errors import ActorDied, AsyncRLError, ConfigError, Overdue
from asyncrl.engine.lifecycle.assemble import assemble
from asyncrl.engine.lifecycle.checks import warn_of_settings
from asyncrl.engine.lifecycle.evaluation import evaluation_config, evaluation_partition
from asyncrl.engine.lifecycle.parts import train_partition, with_slots
from asyncrl.engine.lifecycle.ray_actors import CollectorActor, EvaluatorActor, RankActor
from asyncrl.engine.lifecycle.transports import Transports, choose_way, weight_directory
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.work import ForwardWork, RankResult, TrainWork
from asyncrl.engine.weights.base import Offer, Sent, WeightTransport
from asyncrl.engine.weights.ray_store import RayObjectStore
from asyncrl.filters.taggers import Tagger
from asyncrl.trainers.reducer import MeetingPoint

log = structlog.get_logger()

# The limit of a call whose caller has a limit of its own, with an error that says more.
_CALLERS_S = float("inf")


class RemoteActor:
    """A handle on an actor: calls have a deadline, and its death is an ActorDied."""

    def __init__(self, name: str, actor: Any, answer_timeout_s: float) -> None:
        self.name = name
        self.actor = actor
        self._answer_timeout_s = answer_timeout_s

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return await self._await(self.actor.call.remote(method, args, kwargs), method, timeout_s)

    async def connect(self, *args: Any, timeout_s: float) -> None:
        await self._await(self.actor.connect.remote(*args), "connect", timeout_s)

    async def _await(self, reference: Any, method: str, timeout_s: float | None) -> Any:
        limit = self._answer_timeout_s if timeout_s is None else timeout_s
        try:
            with anyio.fail_after(limit):
                return await reference
        except RayTaskError:
            raise  # The actor's own error, with its traceback.
        except RayActorError as error:
            raise ActorDied(f"{self.name} died during {method}: {error}", actor=self.name) from error
        except TimeoutError:
            raise ActorDied(f"{self.name} did not answer {method} within {limit:g} s", actor=self.name) from None

    async def events(self, after_seq: int, wait_s: float) -> list[Numbered]:
        messages: list[Numbered] = await self._call("events", after_seq, wait_s, timeout_s=_CALLERS_S)
        return messages


class RemoteCollector(RemoteActor):
    def __init__(self, name: str, actor: Any, config: RunConfig) -> None:
        super().__init__(name, actor, config.supervision.answer_timeout_s)

    async def run(self) -> None:
        # No deadline: it ends with the run. The long poll beside it watches the actor.
        await self._call("run", timeout_s=_CALLERS_S)

    async def stop(self) -> None:
        await self._call("stop")

    async def grant(self, grants: Sequence[Grant]) -> None:
        await self._call("grant", grants)

    async def cancel(self, groups: Sequence[int]) -> None:
        await self._call("cancel", groups)

    async def update_weights(self, version: int, offer: Offer) -> Any:
        return await self._call("update_weights", version, offer, timeout_s=_CALLERS_S)


class RemoteRank(RemoteActor):
    def __init__(self, name: str, actor: Any, config: RunConfig) -> None:
        super().__init__(name, actor, config.supervision.answer_timeout_s)
        self._step_timeout_s = config.trainer.step_timeout_s

    async def train(self, work: TrainWork) -> RankResult:
        result: RankResult = await self._call("train", work, timeout_s=self._step_timeout_s)
        return result

    async def logprobs(self, work: ForwardWork) -> dict[str, tuple[float, float]]:
        gaps: dict[str, tuple[float, float]] = await self._call("logprobs", work, timeout_s=self._step_timeout_s)
        return gaps

    async def warm_up(
        self, examples: Sequence[tuple[list[int], int]], *, steps: int, batch: int, learning_rate: float
    ) -> float:
        loss: float = await self._call(
            "warm_up",
            examples,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            timeout_s=self._step_timeout_s * steps,
        )
        return loss

    async def weights(self) -> Sent:
        sent: Sent = await self._call("weights")
        return sent

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        offer: Offer = await self._call("offer", sent, receivers, again=again, timeout_s=_CALLERS_S)
        return offer

    async def serve(self, offer: Offer) -> None:
        await self._call("serve", offer, timeout_s=_CALLERS_S)

    async def copy_weights(self, transport: WeightTransport) -> Sent:
        sent: Sent = await self._call("copy_weights", transport, timeout_s=_CALLERS_S)
        return sent

    async def digest(self) -> Mapping[str, int]:
        digest: Mapping[str, int] = await self._call("digest")
        return digest

    async def hold_weights(self) -> int:
        version: int = await self._call("hold_weights", timeout_s=_CALLERS_S)
        return version

    async def save_held(self, folders: Sequence[str], note: Note) -> None:
        await self._use_disk("save_held", folders, note)

    async def hold_state(self) -> int:
        version: int = await self._call("hold_state", timeout_s=_CALLERS_S)
        return version

    async def save_state(self, folder: str) -> None:
        await self._use_disk("save_state", folder)

    async def load_state(self, folder: str) -> None:
        await self._use_disk("load_state", folder)

    async def _use_disk(self, method: str, *args: Any) -> None:
        try:
            await self._call(method, *args, timeout_s=_CALLERS_S)
        except RayTaskError as error:
            # Its message is a traceback; a full disk or a damaged file is told in one line.
            raise error.cause if isinstance(error.cause, AsyncRLError) else error from None


@asynccontextmanager
async def ray_cluster() -> AsyncIterator[None]:
    """Start Ray on this node's loopback for the length of the context; `prepare` comes first."""
    rays = logging.getLogger("ray")
    level = rays.level
    rays.setLevel(logging.ERROR)
    try:
        await anyio.to_thread.run_sync(_start_ray)
        log.info("Ray started")
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ray.shutdown)
    finally:
        rays.setLevel(level)


def _start_ray() -> None:
    # Ray's processes inherit what this thread blocks. A terminal that closes sends SIGHUP to all of them: they
    # would die before the driver has settled the run. The driver's own threads still get the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(
            address="local",
            namespace="asyncrl",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            _node_ip_address="127.0.0.1",
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@asynccontextmanager
async def ray_deployment(
    config: RunConfig, prepared: PreparedTask, *, taggers: Mapping[str, Tagger] = MappingProxyType({})
) -> AsyncIterator[Deployment]:
    """Start the actors and TransferQueue at the same time on a running Ray; end them with the context.

    `taggers` are those of filters that are not in the configuration; ConfigError if they cannot be pickled.
    """
    user_path, config = str(Path.cwd()), with_slots(config, prepared.prompts)
    pickled_taggers = _pickled(taggers)
    warn_of_settings(config)
    way = choose_way(config)
    remote = {"num_cpus": 0, "max_restarts": 0}
    collectors = [
        RemoteCollector(
            f"collector{i}",
            ray.remote(CollectorActor).options(**remote).remote(config, i, user_path, pickled_taggers),
            config,
        )
        for i in range(config.collector.count)
    ]
    ranks = [
        RemoteRank(f"rank{i}", ray.remote(RankActor).options(**remote).remote(config, i, user_path), config)
        for i in range(config.trainer.ranks)
    ]
    evaluator = _start_evaluator(config, prepared.evaluation, user_path, remote)
    # TransferQueue starts its storage units after its controller. Meanwhile idle workers import what the units will
    # need, and the units then run in these workers.
    warm = ray.remote(num_cpus=0)(_import_transfer_queue)
    for _ in range(config.data_plane.storage_units):
        warm.remote()
    start_s = config.supervision.start_timeout_s
    async with AsyncExitStack() as stack:
        stack.callback(_kill, [handle.actor for handle in (*collectors, *ranks, *evaluator)])
        # Made here, so that it exists before the first rank and outlives the last.
        meeting = MeetingPoint()
        directory = stack.enter_context(weight_directory(config, way))
        transports = Transports.of(config, way, directory, meeting.address)
        try:
            with anyio.fail_after(start_s):
                plane = await TransferQueuePlane.start(
                    storage_units=config.data_plane.storage_units,
                    deadline_s=config.data_plane.deadline_s,
                    start_s=start_s,
                    capacity_rows=config.data_plane.capacity_rows,
                    lease_s=config.data_plane.lease_s,
                    shared_memory=shared_directory(config.data_plane.shared_memory),
                )
                stack.push_async_callback(plane.close)
                log.info("TransferQueue started")
                await plane.register(train_partition(config, prepared.task.extras))
                if evaluator:
                    await plane.register(evaluation_partition(config, prepared.task.extras))
                async with anyio.create_task_group() as tasks:
                    for collector in (*collectors, *evaluator):
                        tasks.start_soon(partial(collector.connect, transports, timeout_s=start_s))
                    for rank in ranks:
                        tasks.start_soon(partial(rank.connect, meeting.address, transports, timeout_s=start_s))
        except TimeoutError as error:
            if isinstance(error, Overdue):
                raise
            raise Overdue(f"the actors did not start within {start_s:g} s") from None
        log.info("actors connected", weight_transport=way)
        evaluation = [EvaluationPart(one, ranks[0], RayObjectStore(), prepared.evaluation) for one in evaluator]
        yield replace(
            assemble(config, prepared, plane=plane, collectors=collectors, ranks=ranks),
            evaluation=evaluation[0] if evaluation else None,
        )


def _start_evaluator(
    config: RunConfig, prompts: Sequence[Prompt], user_path: str, remote: Mapping[str, Any]
) -> list[RemoteCollector]:
    """Start the actor that evaluates, if the run has evaluations."""
    if config.evaluation.every is None:
        return []
    place = config.trainer.ranks + config.collector.count
    used = evaluation_config(config, prompts)
    actor = ray.remote(EvaluatorActor).options(**remote).remote(used, place, user_path)
    return [RemoteCollector(EVALUATOR, actor, config)]


def _pickled(taggers: Mapping[str, Tagger]) -> bytes:
    """Pickle taggers; also functions of a notebook, which other processes cannot import."""
    try:
        pickled: bytes = ray.cloudpickle.dumps(dict(taggers))
    except Exception as error:  # The edge of user code: what a tagger holds may raise anything.
        raise ConfigError(
            f"the taggers of tags {', '.join(taggers)} cannot travel to the collectors: {error!r}"
        ) from error
    return pickled


def _import_transfer_queue() -> None:
    importlib.import_module("transfer_queue.storage.simple_storage")


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
