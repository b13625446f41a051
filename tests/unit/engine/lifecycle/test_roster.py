"""Which nodes of a cluster take a collector that joins, and whose node is drained or gone."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import anyio
import pytest
import structlog
from ray.exceptions import RayError

from asyncrl.configs import Override, load
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.lifecycle import roster as module
from asyncrl.engine.lifecycle.nodes import Seen, own_versions
from asyncrl.engine.lifecycle.placement import Node, Request
from asyncrl.engine.lifecycle.places import Places
from asyncrl.engine.lifecycle.roster import Roster

ROOM = {"CPU": 4.0}
NODES = [Node(name, f"10.0.0.{i}", ROOM, ROOM) for i, name in enumerate("abc")]
PARTS = {"rank0": "a", "collector0": "b"}


def _never(index: int, options: Mapping[str, Any]) -> Any:
    raise AssertionError


class Restarter:
    """Starts collectors by name, or fails as it is told."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self.ended: list[str] = []

    async def begin(self, name: str, start: Any) -> str:
        if self._failure is not None:
            raise self._failure
        return name

    async def end(self, name: str) -> None:
        self.ended.append(name)


def roster(restarter: Restarter | None = None, **cluster: Any) -> Roster:
    options = {"max_collectors": 4, **cluster}
    config = load("default", [Override(f"cluster.{key}", value, "test") for key, value in options.items()]).config
    return Roster(config, Places(), dict(PARTS), cast("Any", restarter), _never)


def names(found: list[Node]) -> str:
    return "".join(node.id for node in found)


@pytest.mark.parametrize(("layout", "open_"), [("any", "abc"), ("apart", "bc"), ("colocated", "a")])
def test_the_layout_holds_for_collectors_that_join(layout: str, open_: str) -> None:
    assert names(roster(layout=layout)._candidates(NODES)) == open_


def test_a_run_takes_no_more_nodes_than_it_may() -> None:
    assert names(roster(nodes=2)._candidates(NODES)) == "ab"
    assert names(roster(nodes=3)._candidates(NODES)) == "abc"


def test_collectors_of_drained_nodes_have_the_time_that_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is put on such a node; ranks cannot leave, so they are not named."""
    made = roster()
    ends = {"b": int(1000 * (time.time() + 60)), "a": 0, "x": 0}
    monkeypatch.setattr(module, "_states", lambda: ({"a", "b", "c"}, ends))
    found = anyio.run(made.look)
    assert found == {"collector0": pytest.approx(60, abs=5)}
    assert names(made._candidates(NODES)) == "c"
    assert not made.has_lost("collector0")


def test_a_drained_node_without_a_deadline_leaves_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = roster()
    monkeypatch.setattr(module, "_states", lambda: ({"a", "b"}, {"b": 0}))
    assert anyio.run(made.look) == {"collector0": float("inf")}


def test_a_collector_whose_node_is_gone_is_lost_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = roster()
    monkeypatch.setattr(module, "_states", lambda: ({"a", "c"}, {}))
    assert anyio.run(made.look) == {}
    assert made.has_lost("collector0")
    assert not made.has_lost("collector7")


def test_a_moment_without_an_answer_of_ray_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = roster()

    def fails() -> Any:
        raise RuntimeError("the GCS does not answer")

    monkeypatch.setattr(module, "_states", fails)
    assert anyio.run(made.look) == {}
    assert not made.has_lost("collector0")


class Room:
    """What Ray would say and do: `given_back` are groups that were removed; nodes of `odd` have other software."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: Node, odd: str = "") -> None:
        self.held: list[str] = []
        self.given_back: list[str] = []
        self._odd = odd
        monkeypatch.setattr(module, "living_nodes", lambda: list(nodes))
        monkeypatch.setattr(module, "hold", self._hold)
        monkeypatch.setattr(module, "options_in", lambda group, requests: {requests[0].part: {}})
        monkeypatch.setattr(module, "remove_placement_group", self.given_back.append)
        monkeypatch.setattr(module, "probe", self._probe)

    async def _hold(self, requests: Sequence[Request], nodes: Mapping[str, Node]) -> str:
        [request] = requests
        self.held.append(f"{request.part} on {nodes[request.part].id}")
        return self.held[-1]

    async def _probe(self, nodes: Sequence[Node], paths: Sequence[str], timeout_s: float) -> dict[str, Seen]:
        versions = own_versions()
        return {node.id: Seen({**versions, "torch": "0"} if node.id in self._odd else versions) for node in nodes}


def test_a_collector_joins_where_there_is_room_under_the_next_number(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Node("c", "10.0.0.2", ROOM, {"CPU": 0.0})
    room, made = Room(monkeypatch, NODES[1], full), roster(Restarter(), layout="apart")
    recruited: list[Any] = [anyio.run(made.recruit), anyio.run(made.recruit)]
    assert recruited == ["collector1", "collector2"]
    assert room.held == ["collector1 on b", "collector2 on b"]
    anyio.run(made.dismiss, "collector1")
    assert room.given_back == ["collector1 on b"]


def test_without_room_none_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, Node("b", "10.0.0.1", ROOM, {"CPU": 0.0}))
    assert anyio.run(roster(Restarter()).recruit) is None
    assert room.held == []


def test_a_node_with_other_software_is_named_and_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    room, made = Room(monkeypatch, NODES[2], odd="c"), roster(Restarter())
    with structlog.testing.capture_logs() as logs:
        assert anyio.run(made.recruit) is None
        assert anyio.run(made.recruit) is None
    assert room.held == []
    [said] = [entry for entry in logs if entry["event"] == "a node that was added cannot be used"]
    assert "torch 0 where this process has" in said["why"]


@pytest.mark.parametrize("failure", [Overdue("too slow"), RayError("its constructor raised")])
def test_one_that_does_not_come_up_gives_back_its_place(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """An error of it alone, whatever it is, does not end the run."""
    room, restarter = Room(monkeypatch, NODES[1]), Restarter(failure)
    with pytest.raises((ActorDied, Overdue)):
        anyio.run(roster(restarter).recruit)
    assert room.given_back == room.held == ["collector1 on b"]
    assert restarter.ended == ["collector1"]
