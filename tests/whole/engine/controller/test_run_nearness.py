"""In a run on several nodes ranks train on what is stored on their node, by what the log says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from asyncrl.engine import metrics
from asyncrl.engine.data_plane.base import Column
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.deployment import Deployment
from asyncrl.engine.events.types import Planned, RanksPlaced, StepEnded
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import STORED_AT
from asyncrl.engine.records.keys import row_of
from asyncrl.engine.records.traffic import Flow, Traffic
from asyncrl.engine.testing.fakes import FakeGenerator
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.replay import replay


class OnTwoNodes(PassingPlane):
    """Rows are on nodes by turns, and each put has gone one way."""

    puts = 0

    async def put(self, partition: str, group: GroupMeta, columns: Mapping[str, Column]) -> GroupMeta:
        self.puts += 1
        node = f"node{group.group % 2}"
        return await super().put(partition, GroupMeta(group.keys, {**group.tags, STORED_AT: node}), columns)

    def traffic(self) -> Traffic:
        return Traffic(puts={"store_far": Flow(100 * self.puts, 0.5 * self.puts)})


class Placed(Controller):
    """A controller that knows the nodes of its ranks."""

    def __init__(self, config: Any, deployment: Deployment, **parts: Any) -> None:
        super().__init__(config, replace(deployment, rank_nodes=["node0", "node1"]), **parts)


def run(controller: type[Controller]) -> Outcome:
    config = simulated_config(rollout__groups_per_step=8, trainer__ranks=2, trainer__micro_batch_tokens=64, filters=[])
    generators = [FakeGenerator(seconds=lambda call: 1.0, length=lambda call: 2 + call % 5)]
    return simulate(config, generators=generators, wrap=OnTwoNodes, controller=controller)


def replace_nodes(event: RanksPlaced) -> RanksPlaced:
    return msgspec.structs.replace(event, nodes=[])


def near_share(outcome: Outcome) -> float:
    keys = [
        (rank, int(row_of(key).rpartition("p")[2]) % 2)
        for plan in outcome.of(Planned)
        for rank, batches in enumerate(plan.ranks)
        for batch in batches
        for key in batch
    ]
    return sum(rank == node for rank, node in keys) / len(keys)


def test_ranks_train_on_what_is_on_their_node_and_the_log_replays() -> None:
    placed, plain = run(Placed), run(Controller)
    assert placed.of(RanksPlaced)[0].nodes == ["node0", "node1"]
    assert plain.of(RanksPlaced) == []
    assert near_share(placed) > 0.85 > near_share(plain)
    for outcome in (placed, plain):
        assert outcome.ending.code == 0
        assert replay(recording_of(outcome)).difference is None


def test_a_replay_without_the_nodes_plans_otherwise() -> None:
    """So what a plan uses is in the log."""
    outcome = run(Placed)
    # Its number stays, so that no line is missing.
    forgotten = [replace_nodes(event) if isinstance(event, RanksPlaced) else event for event in outcome.events]
    assert replay(recording_of(replace(outcome, events=forgotten))).difference is not None


def test_steps_report_what_was_put_by_path() -> None:
    outcome = run(Placed)
    steps = [event.metrics for event in outcome.of(StepEnded)]
    assert (
        sum(step[f"{metrics.PUT}_store_far_bytes"] for step in steps) <= 100 * outcome.controller.core.groups.arrivals
    )
    assert steps[0][f"{metrics.PUT}_store_far_bytes"] >= 800
    assert steps[0][f"{metrics.PUT}_store_far_bytes_per_s"] == pytest.approx(200)
    assert steps[0][f"{metrics.PUT}_memory_near_bytes"] == steps[0][metrics.NEAR_SHARE] == 0
