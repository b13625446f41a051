"""A Ray cluster of others that a run joins.

Invariant: what the run has on the cluster belongs to its job, in a namespace of its own, so that it goes with the job,
however that ends, and no other run finds it.
"""

import asyncio
import logging
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray
import structlog

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError, Overdue
from asyncrl.engine.lifecycle.nodes import check_alike, check_paths, driver_node, living_nodes, own_versions, probe
from asyncrl.engine.lifecycle.placement import Node
from asyncrl.engine.lifecycle.places import Places
from asyncrl.engine.lifecycle.process_env import variables_for_nodes
from asyncrl.engine.lifecycle.reservation import reservation
from asyncrl.engine.lifecycle.working_folder import pack_folder

log = structlog.get_logger()


@asynccontextmanager
async def joined_cluster(address: str, config: RunConfig, *, directory: Path) -> AsyncIterator[Places]:
    """Join the cluster at `address`, and leave it as it was; yields where the parts of the run go.

    `directory` is the run's. ConfigError if no node of it runs on this host, if a node has other
    versions or cannot see a path that it needs; Overdue if joining takes longer than all parts may take to start.
    """
    rays = logging.getLogger("ray")
    level = rays.level
    rays.setLevel(logging.ERROR)
    start_s = config.supervision.start_timeout_s
    try:
        try:
            with tempfile.TemporaryDirectory(prefix="asyncrl-") as kept, anyio.fail_after(start_s):
                await _in_daemon_thread(partial(_join, address, config, Path(kept), directory))
        except TimeoutError:
            raise Overdue(
                f"the Ray cluster at {address} did not take this run within {start_s:g} s (supervision.start_timeout_s)"
            ) from None
        try:
            async with _places(config, directory) as places:
                yield places
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ray.shutdown)
    finally:
        rays.setLevel(level)


def look_at_cluster(address: str) -> list[Node]:
    """Return the nodes of the cluster at `address`, the driver's first; joins it for that moment. Blocking."""
    _init(address, f"asyncrl-{uuid.uuid4().hex[:12]}", {})
    try:
        return living_nodes()
    finally:
        ray.shutdown()


def _join(address: str, config: RunConfig, kept: Path, directory: Path) -> None:
    package = kept / "working-folder.zip"
    folder = Path.cwd()
    # The run's own files change while it runs.
    own = [str(directory.relative_to(folder))] if directory.is_relative_to(folder) else []
    files = pack_folder(folder, package, exclude=[*config.cluster.exclude, *own])
    threads = max(config.collector.threads, config.trainer.threads)
    environment: dict[str, Any] = {"env_vars": variables_for_nodes(threads, config.cluster.environment)}
    if files:
        environment["working_dir"] = str(package)
    namespace = f"asyncrl-{uuid.uuid4().hex[:12]}"
    gcs = _init(address, namespace, environment)
    log.info("joined a Ray cluster", address=gcs, namespace=namespace, files=files)


def _init(address: str, namespace: str, environment: Mapping[str, Any]) -> str:
    """Join the cluster, and return its address; ConfigError if this host is not one of its nodes."""
    try:
        context = ray.init(
            address=address,
            namespace=namespace,
            runtime_env=dict(environment),
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        with suppress(Exception):  # What is half joined is left; the cause is told all the same.
            ray.shutdown()
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined from this host: {str(error).strip()}. A node of it has to "
            "run here, by this user: ray start --address=HOST:PORT (docs/clusters.md)"
        ) from error
    return str(context.address_info["gcs_address"])


async def _in_daemon_thread(call: Callable[[], None]) -> None:
    """Make a call that may hang; a daemon thread does not keep the process when it is left alone."""
    loop, done = asyncio.get_running_loop(), anyio.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # Carried over to whoever waits.
            failed.append(error)
        with suppress(RuntimeError):  # Nobody waits any more.
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, daemon=True).start()
    await done.wait()
    if failed:
        raise failed[0]


@asynccontextmanager
async def _places(config: RunConfig, directory: Path) -> AsyncIterator[Places]:
    """Yield where the parts go, with the room reserved, once the nodes are known to be alike."""
    async with reservation(config) as reserved:
        here = await anyio.to_thread.run_sync(driver_node)
        used = list({node.id: node for node in (here, *reserved.nodes.values())}.values())
        paths = _paths(config, directory)
        seen = await probe(used, list(paths), config.supervision.start_timeout_s)
        check_alike(own_versions(), used, seen)
        check_paths(used, seen, paths)
        elastic = config.cluster.max_collectors is not None
        log.info("places", parts={part: node.address for part, node in reserved.nodes.items()})
        yield Places(
            options=reserved.options(),
            address=here.address,
            # The driver reads rows too.
            one_node=len(used) == 1 and not elastic,
            # What leaves must not hold rows.
            storage=tuple(
                dict.fromkeys(
                    node.id for part, node in reserved.nodes.items() if part.startswith("rank") or not elastic
                )
            ),
            joined=True,
            nodes={part: node.id for part, node in reserved.nodes.items()},
            addresses={part: node.address for part, node in reserved.nodes.items()},
            paths=paths,
            own_gpus=all(request.gpus >= 1 for request in reserved.requests.values()),
        )


def _paths(config: RunConfig, directory: Path) -> dict[str, str]:
    """Return the options that name a path which every node needs, by path."""
    options = {"model.path": config.model.path, "trainer.weight_folder": config.trainer.weight_folder}
    paths = {str(Path(path).absolute()): option for option, path in options.items() if path is not None}
    if _ranks_write(config):
        paths[str(directory)] = "--run-dir, in which ranks save the model and checkpoints,"
    return paths


def _ranks_write(config: RunConfig) -> bool:
    """Return whether ranks, which may be on any node, write to the run's folder."""
    return config.run.save_model or config.run.save_every is not None or config.checkpoint.is_kept
