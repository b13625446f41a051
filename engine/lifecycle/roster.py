"""The nodes of a cluster that is joined, for collectors that come and go: who has room, who is drained, who is gone.

Invariant: a collector that joins has a placement group of its own, on a node of the same software, and gives it back
when it leaves, or does not come up.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import ray
import structlog
from ray.util.placement_group import PlacementGroup, remove_placement_group

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import EVALUATOR, CollectorHandle
from asyncrl.engine.errors import ActorDied, ConfigError, Overdue
from asyncrl.engine.lifecycle.nodes import check_alike, check_paths, living_nodes, own_versions, probe
from asyncrl.engine.lifecycle.placement import DoesNotFit, Node, Request, assign, requests_of
from asyncrl.engine.lifecycle.places import Places
from asyncrl.engine.lifecycle.ray_handles import RemoteCollector
from asyncrl.engine.lifecycle.ray_restarts import RayRestarter
from asyncrl.engine.lifecycle.reservation import hold, options_in

log = structlog.get_logger()

StartAt = Callable[[int, Mapping[str, Any]], RemoteCollector]
"""Starts the collector of a number with options of Ray's."""


class Roster:
    """The deployment's. `nodes` are Ray's ids of the nodes by part, which it keeps up to date."""

    def __init__(
        self, config: RunConfig, places: Places, nodes: dict[str, str], restarter: RayRestarter, start: StartAt
    ) -> None:
        self._config = config
        self._places = places
        self._nodes = nodes
        self._restarter = restarter
        self._start = start
        self._next = config.collector.count
        self._groups: dict[str, PlacementGroup] = {}
        self._alive: set[str] = set(nodes.values())
        self._drained: dict[str, float] = {}
        self._known = set(nodes.values())
        self._refused: set[str] = set()
        self._told: set[str] = set()

    async def look(self) -> Mapping[str, float]:
        try:
            alive, ends = await anyio.to_thread.run_sync(_states, abandon_on_cancel=True)
        except Exception as error:  # The edge of Ray's state, which may not answer for a moment.
            log.warning("Ray did not say which nodes there are", why=repr(error))
            return {}
        self._alive = alive
        self._drained = {node: max(0.0, at / 1000 - time.time()) if at else math.inf for node, at in ends.items()}
        found = {part: self._drained[node] for part, node in self._nodes.items() if node in self._drained}
        for part in sorted(found.keys() - self._told):
            if part.startswith("rank") or part == EVALUATOR:
                self._told.add(part)
                log.warning("a node is drained whose part cannot leave; the run does not outlive it", part=part)
        return {part: left_s for part, left_s in found.items() if part.startswith("collector")}

    async def recruit(self) -> CollectorHandle | None:
        nodes = await anyio.to_thread.run_sync(living_nodes, abandon_on_cancel=True)
        name = f"collector{self._next}"
        request = self._request(name, nodes)
        try:
            node = assign([request], self._candidates(nodes), layout="any")[name]
        except DoesNotFit:
            return None
        if not await self._is_alike(node):
            return None
        try:
            group = await hold([request], {name: node})
        except ray.exceptions.RayError as error:
            raise ActorDied(f"{name} got no place on {node.address}: {error}", actor=name) from error
        if group is None:  # Somebody else was quicker.
            return None
        self._next += 1
        self._nodes[name], self._groups[name] = node.id, group
        log.info("a collector is added", collector=name, node=node.address)
        try:
            options = options_in(group, [request])[name]
            return await self._restarter.begin(name, partial(self._start, int(name.removeprefix("collector")), options))
        except (ActorDied, Overdue, ray.exceptions.RayError) as error:
            await self.dismiss(name)
            if isinstance(error, ray.exceptions.RayError):  # Its own error, with its traceback.
                last = str(error).strip().splitlines()[-1]
                raise ActorDied(f"{name} did not start on {node.address}: {last}", actor=name) from error
            raise

    def has_lost(self, name: str) -> bool:
        return name in self._nodes and self._nodes[name] not in self._alive

    async def dismiss(self, name: str) -> None:
        await self._restarter.end(name)
        self._nodes.pop(name, None)
        group = self._groups.pop(name, None)
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        """End every actor of the run without waiting, and give back the places of those that joined."""
        self._restarter.kill_all()
        for group in self._groups.values():
            remove_placement_group(group)

    def _request(self, name: str, nodes: Sequence[Node]) -> Request:
        """Return what a collector asks for."""
        like = next(one for one in requests_of(self._config, nodes) if one.part == "collector0")
        return Request(name, like.cpus, like.gpus)

    def _candidates(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes on which a collector may be, by layout and number of nodes."""
        cluster = self._config.cluster
        with_ranks = {node for part, node in self._nodes.items() if part.startswith("rank")}
        used = set(self._nodes.values())
        open_ = [node for node in nodes if node.id not in self._drained and node.id not in self._refused]
        if cluster.layout != "any":
            open_ = [node for node in open_ if (node.id in with_ranks) == (cluster.layout == "colocated")]
        if cluster.nodes is not None and len(used) >= cluster.nodes:
            open_ = [node for node in open_ if node.id in used]
        return open_

    async def _is_alike(self, node: Node) -> bool:
        """Return whether a node runs what this one runs; one that does not is not asked again."""
        if node.id in self._known:
            return True
        try:
            seen = await probe([node], list(self._places.paths), self._config.supervision.start_timeout_s)
            check_alike(own_versions(), [node], seen)
            check_paths([node], seen, self._places.paths)
        except ConfigError as error:
            self._refused.add(node.id)
            log.warning("a node that was added cannot be used", node=node.address, why=str(error))
            return False
        self._known.add(node.id)
        return True


def _states() -> tuple[set[str], dict[str, int]]:
    """Return the ids of living nodes, and when those that are drained end, in ms since 1970 (0: not said)."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return alive, ray._private.state.state.get_draining_nodes()
