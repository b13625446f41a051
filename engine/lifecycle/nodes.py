"""The nodes of a Ray cluster: what they have, and whether they run what this process runs."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.placement import Node

SOFTWARE = ("asyncrl", "ray", "torch", "transferqueue", "transformers")
"""Packages of which all nodes need the same version: objects of their classes travel between them."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a probe found on a node: versions by name, and which of the paths asked for are not there."""

    versions: Mapping[str, str]
    missing: tuple[str, ...] = ()


def living_nodes() -> list[Node]:
    """Return the nodes of the cluster that this process is connected to; the driver's first."""
    here = ray.get_runtime_context().get_node_id()
    free = ray._private.state.available_resources_per_node()
    nodes = [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            is_driver=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (not node.is_driver, node.address, node.id))


def is_alive(node: str) -> bool:
    """Return whether the node with this id is one of the cluster's still."""
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def driver_node() -> Node:
    """Return the node that this process is on."""
    return living_nodes()[0]


async def probe(nodes: Sequence[Node], paths: Sequence[str], timeout_s: float) -> dict[str, Seen]:
    """Look at nodes, by a task on each: return what was found, by id.

    ConfigError, naming the nodes, if one cannot run the task, or has not within `timeout_s`.
    """
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    with _by_value():
        tasks = [
            look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                SOFTWARE, tuple(paths)
            )
            for node in nodes
        ]
    seen: dict[str, Seen] = {}
    with anyio.move_on_after(timeout_s):
        for node, task in zip(nodes, tasks, strict=True):
            seen[node.id] = await _answer(node, task)
    silent = [node.address for node in nodes if node.id not in seen]
    if silent:
        for task in tasks:
            ray.cancel(task, force=True)
        raise ConfigError(
            f"the nodes {', '.join(silent)} of the Ray cluster did not run a task within {timeout_s:g} s "
            "(supervision.start_timeout_s); the logs of their raylets may say why"
        )
    return seen


async def _answer(node: Node, task: Any) -> Seen:
    try:
        return Seen(*(await task))
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1]
        raise ConfigError(f"the node {node.address} of the Ray cluster cannot run a task: {last}") from error


def own_versions() -> dict[str, str]:
    """Return the versions of this process."""
    return _look(SOFTWARE, ())[0]


def check_alike(here: Mapping[str, str], nodes: Sequence[Node], seen: Mapping[str, Seen]) -> None:
    """ConfigError that names every node whose versions differ from `here`, and how."""
    different = []
    for node in nodes:
        theirs = seen[node.id].versions
        pairs = [f"{name} {theirs.get(name)} where this process has {mine}" for name, mine in here.items()]
        odd = [pair for pair, (name, mine) in zip(pairs, here.items(), strict=True) if theirs.get(name) != mine]
        if odd:
            different.append(f"{node.address} has {', '.join(odd)}")
    if different:
        raise ConfigError(
            f"the nodes of the Ray cluster have other versions: {'; '.join(different)}. Install the same everywhere: "
            "objects of these packages travel between the nodes"
        )


def check_paths(nodes: Sequence[Node], seen: Mapping[str, Seen], options: Mapping[str, str]) -> None:
    """ConfigError if a node does not see a path; `options` name the options that ask for them, by path."""
    for path, option in options.items():
        blind = [node.address for node in nodes if path in seen[node.id].missing]
        if blind:
            raise ConfigError(
                f"{option} is {path!r}, which the nodes {', '.join(blind)} of the Ray cluster do not have; put it on a "
                "file system that all of them see under that path"
            )


def _look(names: Sequence[str], paths: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return versions by name, without what follows a `+` (how torch was built), and the paths that are not there."""
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "system": platform.system()}
    for name in names:
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            versions[name] = "none"
    return versions, tuple(path for path in paths if not os.path.exists(path))


@contextmanager
def _by_value() -> Iterator[None]:
    """Have functions of this module travel whole: a node without asyncrl can then say so."""
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
