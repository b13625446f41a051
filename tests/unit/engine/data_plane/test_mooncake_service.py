"""What Mooncake's processes ask of a node, without Mooncake."""

from pathlib import Path

import pytest

from asyncrl.engine.data_plane.mooncake_service import MooncakeSettings, check_memory, choose_protocol, free_bytes
from asyncrl.engine.errors import DataPlaneError


def test_segments_that_do_not_fit_into_a_nodes_memory_are_refused_with_both_numbers() -> None:
    settings = MooncakeSettings(units=3, segment_bytes=2 << 30)
    check_memory(settings, 3, 6 << 30)
    with pytest.raises(DataPlaneError, match=r"3 storage .* 6\.0 GiB, and this node has 5\.5 GiB"):
        check_memory(settings, 3, 11 << 29)


def test_a_containers_limit_counts_and_rdma_is_taken_only_where_a_device_is(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576")
    (tmp_path / "memory.current").write_text("1000000")
    assert free_bytes(tmp_path) == 48576
    (tmp_path / "memory.max").write_text("max")
    assert free_bytes(tmp_path) > 48576
    devices = tmp_path / "infiniband"
    assert choose_protocol("auto", devices) == "tcp"
    devices.mkdir()
    assert choose_protocol("auto", devices) == "tcp"
    (devices / "mlx5_0").touch()
    assert choose_protocol("auto", devices) == "rdma"
    assert choose_protocol("tcp", devices) == "tcp"
