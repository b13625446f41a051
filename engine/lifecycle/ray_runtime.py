"""`runtime: ray`: Ray, TransferQueue and one process per actor, on this node's loopback or on a cluster that is joined.

Invariant: whatever was started here is gone when the context ends, however it ends.
"""

import importlib
import logging
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import psutil
import ray
import structlog

from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.data_plane.mooncake_service import MooncakeSettings
from asyncrl.engine.data_plane.shared_memory import shared_directory
from asyncrl.engine.data_plane.shelves import OnNodes
from asyncrl.engine.data_plane.tq import TransferQueuePlane
from asyncrl.engine.deployment import EVALUATOR, Deployment, EvaluationPart
from asyncrl.engine.errors import ConfigError, Overdue
from asyncrl.engine.lifecycle.assemble import assemble, replicas_of
from asyncrl.engine.lifecycle.checks import warn_of_settings
from asyncrl.engine.lifecycle.evaluation import evaluation_config, evaluation_partition
from asyncrl.engine.lifecycle.nodes import is_alive
from asyncrl.engine.lifecycle.parts import train_partition, with_slots
from asyncrl.engine.lifecycle.places import ONE_NODE, Places
from asyncrl.engine.lifecycle.ray_actors import CollectorActor, EvaluatorActor, RankActor
from asyncrl.engine.lifecycle.ray_handles import RemoteCollector, RemoteRank
from asyncrl.engine.lifecycle.ray_restarts import RayRestarter
from asyncrl.engine.lifecycle.ray_token import ray_token
from asyncrl.engine.lifecycle.roster import Roster
from asyncrl.engine.lifecycle.transports import Transports, Way, choose_way, choose_way_on_cluster, weight_directory
from asyncrl.engine.records import Prompt
from asyncrl.engine.weights.ray_store import RayObjectStore
from asyncrl.filters.taggers import Tagger
from asyncrl.trainers.reducer import MeetingPoint

log = structlog.get_logger()

_PROCESSES = ("raylet", "gcs_server")
_END_S = 3.0
_TOO_SLOW = "timed out during startup"


@asynccontextmanager
async def ray_cluster() -> AsyncIterator[Places]:
    """Start Ray on this node's loopback, with a token of its own, for the length of the context.

    `prepare` comes first. Overdue if Ray gives up its start because something of it took too long.
    """
    rays = logging.getLogger("ray")
    level = rays.level
    rays.setLevel(logging.ERROR)
    # The kernel kills Ray's processes when the thread that started them ends, and anyio ends threads that were idle for
    # ten seconds. This one stays.
    stays = ThreadPoolExecutor(1, "ray")
    try:
        with ray_token():
            try:
                await anyio.to_thread.run_sync(stays.submit(_start_ray).result)
                log.info("Ray started")
                yield ONE_NODE
            finally:  # Also what a start that failed has left.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(stays.submit(_end_ray).result)
    finally:
        stays.shutdown(wait=False)
        rays.setLevel(level)


def _end_ray() -> None:
    """End Ray, with workers that are stopped and do not hear that it ends."""
    own = [child for child in psutil.Process().children() if child.name() in _PROCESSES]
    started = [*own, *(worker for child in own for worker in child.children(recursive=True))]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=_END_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
    except Exception as error:
        # Ray has a limit of its own for this, and no type of error: on a host that is busy the next try may do.
        if _TOO_SLOW not in str(error):
            raise
        raise Overdue(f"Ray did not start, perhaps because this host is overloaded: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@asynccontextmanager
async def ray_deployment(
    config: RunConfig,
    prepared: PreparedTask,
    *,
    taggers: Mapping[str, Tagger] = MappingProxyType({}),
    places: Places = ONE_NODE,
) -> AsyncIterator[Deployment]:
    """Start the actors and TransferQueue at the same time on a running Ray, at their `places`; end them at the end.

    `taggers` are those of filters that are not in the configuration; ConfigError if they cannot be pickled.
    """
    config = places.config_for_parts(with_slots(config, prepared.prompts))
    user_path = None if places.joined else str(Path.cwd())
    pickled_taggers = _pickled(taggers)
    warn_of_settings(config)
    way = _way(config, places)
    start_s = config.supervision.start_timeout_s
    met: list[Transports] = []
    nodes = dict(places.nodes)
    restarter = RayRestarter(
        lambda actor: actor.connect(met[0], timeout_s=start_s),
        start_s=start_s,
        is_lost=lambda name: name in nodes and not is_alive(nodes[name]),
    )

    def start_collector(i: int, options: Mapping[str, Any]) -> RemoteCollector:
        name = f"collector{i}"
        actor = ray.remote(CollectorActor).options(**options).remote(config, i, user_path, pickled_taggers)
        return RemoteCollector(name, actor, config)

    collectors = [
        restarter.start(name, partial(start_collector, i, places.options_of(name)))
        for i, name in enumerate(f"collector{i}" for i in range(config.collector.count))
    ]
    elastic = config.cluster.max_collectors is not None
    roster = Roster(config, places, nodes, restarter, start_collector) if elastic else None
    ranks = [
        RemoteRank(name, ray.remote(RankActor).options(**places.options_of(name)).remote(config, i, user_path), config)
        for i, name in enumerate(f"rank{i}" for i in range(config.trainer.ranks))
    ]
    restarter.add(ranks)
    evaluator = []
    if config.evaluation.every is not None:
        start_evaluator = partial(_start_evaluator, config, prepared.evaluation, user_path, places)
        evaluator = [restarter.start(EVALUATOR, start_evaluator)]
    # TransferQueue starts its storage units after its controller. Meanwhile idle workers import what the units will
    # need, and the units then run in these workers.
    warm = ray.remote(num_cpus=0)(_import_transfer_queue)
    for _ in range(config.data_plane.storage_units):
        warm.remote()
    async with AsyncExitStack() as stack:
        stack.callback(restarter.kill_all if roster is None else roster.close)
        # Made here, so that it exists before the first rank and outlives the last.
        meeting = MeetingPoint(places.address)
        directory = stack.enter_context(weight_directory(config, way))
        transports = Transports.of(config, way, directory, meeting.address)
        met.append(transports)
        try:
            with anyio.fail_after(start_s):
                plane = await TransferQueuePlane.start(
                    deadline_s=config.data_plane.deadline_s,
                    start_s=start_s,
                    lease_s=config.data_plane.lease_s,
                    **_storage(config, places),
                    nodes=places.storage,
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
        source = replicas_of(config, ranks)[0]
        evaluation = [EvaluationPart(one, source, RayObjectStore(), prepared.evaluation) for one in evaluator]
        yield replace(
            assemble(config, prepared, plane=plane, collectors=collectors, ranks=ranks),
            evaluation=evaluation[0] if evaluation else None,
            restarter=restarter,
            roster=roster,
            rank_nodes=[address for address, _ in places.of_ranks(config.trainer.ranks)],
        )


def _way(config: RunConfig, places: Places) -> Way:
    if places.joined:
        return choose_way_on_cluster(config, own_gpus=places.own_gpus, one_node=places.one_node)
    return choose_way(config)


def _start_evaluator(
    config: RunConfig, prompts: Sequence[Prompt], user_path: str | None, places: Places
) -> RemoteCollector:
    """Start the actor that evaluates."""
    place = config.trainer.ranks + config.collector.count
    used = evaluation_config(config, prompts)
    actor = ray.remote(EvaluatorActor).options(**places.options_of(EVALUATOR)).remote(used, place, user_path)
    return RemoteCollector(EVALUATOR, actor, config)


def _pickled(taggers: Mapping[str, Tagger]) -> bytes:
    """Pickle taggers; also functions of a notebook, which other processes cannot import."""
    try:
        pickled: bytes = ray.cloudpickle.dumps(dict(taggers))
    except Exception as error:  # The edge of user code: what a tagger holds may raise anything.
        raise ConfigError(
            f"the taggers of tags {', '.join(taggers)} cannot travel to the collectors: {error!r}"
        ) from error
    return pickled


def _storage(config: RunConfig, places: Places) -> dict[str, Any]:
    """Return where payloads go, as arguments of the plane's start."""
    plane = config.data_plane
    if plane.backend == "mooncake":
        size = int(plane.mooncake_segment_gib * 2**30)
        settings = MooncakeSettings(plane.storage_units, size, plane.mooncake_protocol, plane.mooncake_devices)
        # TransferQueue starts with one at least, which holds nothing.
        return {"storage_units": 1, "mooncake": settings}
    memory: Path | OnNodes | None
    if places.one_node:
        memory = shared_directory(plane.shared_memory)
    else:
        # Processes of another node do not see this one's memory. A limit of rows is one of TransferQueue's storage.
        option = plane.shared_memory if plane.capacity_rows is None else None
        memory = OnNodes(dict(places.of_ranks(config.trainer.ranks)), option)
    return {"storage_units": plane.storage_units, "shared_memory": memory, "capacity_rows": plane.capacity_rows}


def _import_transfer_queue() -> None:
    importlib.import_module("transfer_queue.storage.simple_storage")
