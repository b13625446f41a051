"""What `auto` joins: a Ray with a process on this host, or that of the last `ray start`."""

import socket
from pathlib import Path

import pytest

from asyncrl import ConfigError
from asyncrl.configs import Override, load
from asyncrl.engine.lifecycle.found_ray import FoundRay, find_ray
from asyncrl.engine.running import cluster_checks


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def processes(folder: Path, *lines: str) -> Path:
    for number, line in enumerate(lines, start=1):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "cmdline").write_bytes(line.encode().replace(b" ", b"\0"))
    return folder


def test_a_ray_is_known_by_its_raylet_and_by_its_file(tmp_path: Path) -> None:
    raylet = "/opt/ray/raylet --node_ip_address=10.0.0.1 --gcs-address=10.0.0.1:6379"
    proc = processes(tmp_path / "proc", raylet, "less --gcs-address=10.0.0.2:6379", "/opt/ray/raylet", "")
    assert find_ray(proc, tmp_path) == FoundRay(frozenset({"10.0.0.1:6379"}), None)
    (tmp_path / "ray_current_cluster").write_text("10.0.0.3:6379\n", encoding="utf-8")
    assert find_ray(tmp_path / "none", tmp_path) == FoundRay(frozenset(), "10.0.0.3:6379")


def test_the_variable_of_ray_wins_over_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.4:6379")
    assert find_ray(tmp_path, tmp_path).last == "10.0.0.4:6379"


def test_auto_without_a_ray_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("default", [Override("cluster.address", "auto", "--ray-address")])
    for found, says in (
        (FoundRay(frozenset(), None), "is auto, and no Ray runs on this host"),
        (FoundRay(frozenset(), "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
    ):
        monkeypatch.setattr(cluster_checks, "find_ray", lambda found=found: found)
        with pytest.raises(ConfigError, match=says):
            cluster_checks.check_cluster(loaded)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        for found in (FoundRay(frozenset({"10.0.0.1:6379"}), None), FoundRay(frozenset(), there)):
            monkeypatch.setattr(cluster_checks, "find_ray", lambda found=found: found)
            cluster_checks.check_cluster(loaded)
