"""Nodes that differ are named."""

import pytest

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.nodes import Seen, check_alike, check_paths
from asyncrl.engine.lifecycle.placement import Node

HERE = {"python": "3.11.7", "torch": "2.11.0"}
NODES = [Node(name, name, {}, {}) for name in ("a", "b")]


def test_every_node_with_other_versions_is_named_with_both() -> None:
    seen = {"a": Seen(HERE), "b": Seen({"python": "3.12.1", "torch": "none"})}
    with pytest.raises(
        ConfigError, match=r"b has python 3\.12\.1 where .* 3\.11\.7, torch none where .* 2\.11\.0"
    ) as said:
        check_alike(HERE, NODES, seen)
    assert "a has" not in str(said.value)
    check_alike(HERE, NODES[:1], seen)


def test_a_path_that_a_node_does_not_see_is_named_with_its_option() -> None:
    seen = {"a": Seen(HERE), "b": Seen(HERE, ("/runs/one",))}
    with pytest.raises(ConfigError, match="--run-dir is '/runs/one', which the nodes b "):
        check_paths(NODES, seen, {"/runs/one": "--run-dir"})
