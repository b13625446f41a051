"""The room of a run on a cluster that is joined: a placement group of Ray's, with a bundle for each part.

Invariant: what a part uses is reserved for it before anything starts, also while it is replaced, and goes back at the
end. Which node has which bundle was decided by `placement`; Ray holds what was decided, or it is decided anew.
"""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import structlog
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.configs import RunConfig
from asyncrl.engine.lifecycle.nodes import living_nodes
from asyncrl.engine.lifecycle.placement import DoesNotFit, Node, Request, assign, requests_of

log = structlog.get_logger()

_NODE = "ray.io/node-id"
_LOOK_EVERY_S = 1.0
_HOLD_S = 10.0
"""Ray holds free room within milliseconds. Longer means that somebody else was quicker."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where each part goes, and with what options of Ray's."""

    requests: Mapping[str, Request]
    nodes: Mapping[str, Node]
    group: PlacementGroup

    def options(self) -> dict[str, dict[str, Any]]:
        return options_in(self.group, list(self.requests.values()))


def options_in(group: PlacementGroup, requests: Sequence[Request]) -> dict[str, dict[str, Any]]:
    """Return the options of parts by which they are in the bundles of a group that was made for them."""
    return {
        request.part: {
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i),
        }
        for i, request in enumerate(requests)
    }


@asynccontextmanager
async def reservation(config: RunConfig) -> AsyncIterator[Reservation]:
    """Reserve the room of all parts, and give it back at the end.

    Nodes may come and others leave: DoesNotFit, with what does not fit, if there is no room within
    `cluster.place_timeout_s`.
    """
    found = await _wait_for_room(config)
    try:
        yield found
    finally:
        remove_placement_group(found.group)


async def _wait_for_room(config: RunConfig) -> Reservation:
    limit = config.cluster.place_timeout_s
    deadline = time.monotonic() + limit
    told = False
    while True:
        nodes = await anyio.to_thread.run_sync(living_nodes)
        requests = requests_of(config, nodes)
        why = "others reserve what is free"
        try:
            assigned = _assigned(config, requests, nodes)
            group = await hold(requests, assigned)
            if group is not None:
                return Reservation({request.part: request for request in requests}, assigned, group)
        except DoesNotFit as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise DoesNotFit(
                f"the run has no place on the Ray cluster after {limit:g} s (cluster.place_timeout_s): {why}"
            )
        if not told:
            log.warning("the Ray cluster has no room for the run yet", why=why, waits_s=limit)
            told = True
        await anyio.sleep(_LOOK_EVERY_S)


def _assigned(config: RunConfig, requests: list[Request], nodes: list[Node]) -> dict[str, Node]:
    return assign(requests, nodes, layout=config.cluster.layout, most_nodes=config.cluster.nodes)


async def hold(requests: Sequence[Request], nodes: Mapping[str, Node]) -> PlacementGroup | None:
    """Reserve each request on its node; None if that is not free any more."""
    group = placement_group(
        [request.bundle for request in requests],
        strategy="PACK",
        # Ray wants a name for each, and a run may hold several.
        name=f"asyncrl-{uuid.uuid4().hex[:12]}",
        bundle_label_selector=[{_NODE: nodes[request.part].id} for request in requests],
    )
    held = False
    try:
        with anyio.move_on_after(_HOLD_S):
            await group.ready()
            held = True
    finally:
        if not held:
            remove_placement_group(group)
    return group if held else None
