"""Which way weights take is told by where rank 0 and the collectors compute; what cannot work is refused at once."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.configs import load_config
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.lifecycle.transports import choose_way, choose_way_on_cluster, weight_directory

ONE = {"trainer.ranks": 1, "collector.count": 1}


@pytest.mark.parametrize(
    ("gpus", "given", "way"),
    [
        (0, {}, "object_store"),
        (0, {"run.runtime": "local"}, "in_process"),
        (1, ONE, "cuda_ipc"),
        (2, ONE, "nccl"),
        (2, {"trainer.ranks": 2, "collector.count": 2}, "cuda_ipc"),
        (4, {"trainer.ranks": 2, "collector.count": 2}, "nccl"),
        (3, {"trainer.ranks": 1, "collector.count": 3}, "cuda_ipc"),
        (2, {**ONE, "trainer.device": "cpu"}, "object_store"),
        (2, {**ONE, "collector.device": "cpu"}, "object_store"),
        (2, {**ONE, "trainer.weight_transport": "cuda_ipc"}, "cuda_ipc"),
        (2, {**ONE, "trainer.weight_transport": "object_store"}, "object_store"),
        (0, {"trainer.weight_transport": "shared_memory"}, "shared_memory"),
        (0, {"trainer.weight_transport": "folder", "trainer.weight_folder": "."}, "folder"),
    ],
)
def test_the_way_follows_from_the_devices_and_can_be_overridden(
    gpus: int, given: Any, way: str, tmp_path: Path
) -> None:
    assert choose_way(load_config(overrides=given), count_gpus=lambda: gpus) == way


@pytest.mark.parametrize(
    ("gpus", "given", "what"),
    [
        (0, {"trainer.weight_transport": "cuda_ipc"}, "'cuda_ipc', and rank 0 and the collectors compute on cpu, cpu;"),
        (0, {"trainer.weight_transport": "nccl"}, "'nccl', and rank 0 .* must be auto, object_store, shared_memory"),
        (1, {**ONE, "trainer.weight_transport": "nccl"}, "'nccl', and .*cuda:0, cuda:0, have no GPU each; it must be"),
        (2, {**ONE, "trainer.weight_transport": "nccl", "run.runtime": "local"}, "'nccl', and run.runtime is local"),
        (
            0,
            {"trainer.weight_transport": "shared_memory", "data_plane.shared_memory": None},
            "'shared_memory', and data_plane.shared_memory is null; it must be auto, object_store or folder",
        ),
        (0, {"trainer.weight_transport": "folder", "trainer.weight_folder": "absent"}, "weight_folder is 'absent'"),
        (0, {"trainer.weight_transport": "folder"}, "is folder and trainer.weight_folder None"),
        (0, {"trainer.weight_folder": "x"}, "is auto and trainer.weight_folder x"),
    ],
)
def test_a_way_that_cannot_work_is_refused_with_option_value_and_range(gpus: int, given: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        choose_way(load_config(overrides=given), count_gpus=lambda: gpus)


def test_what_a_killed_run_left_in_a_folder_goes_with_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "asyncrl-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "weights-000001.safetensors").touch()
    config = load_config(overrides={"trainer.weight_transport": "folder", "trainer.weight_folder": str(tmp_path)})
    with weight_directory(config, "folder") as directory:
        assert list(tmp_path.iterdir()) == [directory]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("shared_memory", "several nodes"),
        ("cuda_ipc", "no part sees another's GPU"),
        ("nccl", "have no GPU each"),
    ],
)
def test_a_way_that_cannot_cross_nodes_is_refused_on_a_cluster(asked: str, says: str) -> None:
    config = load_config(overrides={"trainer.weight_transport": asked})
    with pytest.raises(ConfigError, match=says):
        choose_way_on_cluster(config, own_gpus=False, one_node=False)
    assert choose_way_on_cluster(load_config(), own_gpus=False, one_node=False) == "object_store"
