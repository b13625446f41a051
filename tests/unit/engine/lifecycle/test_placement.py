"""Which node each part goes to."""

from collections.abc import Sequence

import pytest

from asyncrl.configs import load_config
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.placement import Layout, Node, Request, assign, requests_of


def node(name: str, cpus: float, gpus: float = 0, *, free: float | None = None) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    return Node(name, name, total, total if free is None else {"CPU": free, "GPU": gpus})


GIVEN = {"trainer.ranks": 2, "collector.count": 2}


@pytest.mark.parametrize(
    ("layout", "where"),
    [("any", "aabb"), ("apart", "aabb"), ("colocated", "abab")],
)
def test_parts_with_a_gpu_each_go_to_two_nodes_of_two_gpus_by_layout(layout: Layout, where: str) -> None:
    nodes = [node("a", 16, 2), node("b", 16, 2)]
    requests = requests_of(load_config(overrides=GIVEN), nodes)
    assert [request.gpus for request in requests] == [1.0] * 4
    assert "".join(found.id for found in _places(requests, nodes, layout)) == where


def _places(requests: Sequence[Request], nodes: Sequence[Node], layout: Layout) -> list[Node]:
    assigned = assign(requests, nodes, layout=layout)
    return [assigned[request.part] for request in requests]


def test_parts_go_to_as_few_nodes_as_have_what_is_free_and_a_misfit_names_what_each_node_has() -> None:
    requests = requests_of(load_config(overrides=GIVEN), [])
    assert {found.id for found in assign(requests, [node("a", 2), node("b", 8)], layout="any").values()} == {"b"}
    with pytest.raises(ConfigError, match=r"no room for collector1 \(2 CPUs\): b has 1 of 8 CPUs and 0 of 0 GPUs left"):
        assign(requests, [node("b", 8, free=5)], layout="any")
    with pytest.raises(ConfigError, match=r"with `cluster\.layout` apart, which takes two nodes or more"):
        assign(requests, [node("b", 8)], layout="apart")
