"""Runs on a Ray cluster of two hosts, each with a network, a shared memory and a folder of Ray's own.

The hosts are namespaces of this kernel, so it takes root; link.py is what is between them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Published, RunEnded

HERE = Path(__file__).parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CLUSTER = f"{ADDRESSES[0]}:6399"
RAYS = "/tmp/ray"
OWN = f"mount --make-rprivate / && for at in /dev/shm {RAYS}; do mount -t tmpfs tmpfs $at; done && exec sleep 3600"
SMALL = {
    "filters": "[]",
    "run.save_model": "false",
    "checkpoint.every_steps": "1",
    "rollout.groups_per_step": "8",
    "rollout.group_size": "8",
    "trainer.ranks": "1",
    "collector.score_processes": "0",
    "supervision.start_timeout_s": "240",
}


def _permitted() -> bool:
    """Whether this process may make namespaces, mounts and network devices."""
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        return False
    Path(RAYS).mkdir(exist_ok=True)
    with suppress(OSError):
        return not subprocess.run(
            ["unshare", "--net", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs {RAYS} && ip link set lo up"],
            capture_output=True,
            check=False,
        ).returncode
    return False


pytestmark = [
    pytest.mark.nodes,
    pytest.mark.ray,
    pytest.mark.skipif(not _permitted(), reason="namespaces, mounts and /dev/net/tun are not permitted here"),
]


class Hosts:
    """Two hosts with a link, and a node of one Ray cluster on each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.holders = [
            subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", OWN], start_new_session=True)
            for _ in ADDRESSES
        ]
        wait(self._apart, 20)
        self._link = subprocess.Popen(
            [sys.executable, HERE / "link.py", *(str(holder.pid) for holder in self.holders), *ADDRESSES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._link.stdout
        assert self._link.stdout.readline() == "ready\n"
        own = ["--num-cpus", "4", "--block", "--disable-usage-stats"]
        head = ["--head", "--port", CLUSTER.rpartition(":")[2], "--include-dashboard=false"]
        self._rays = [self.start(0, "ray", "start", *head, "--node-ip-address", ADDRESSES[0], *own)]
        joins = ["--address", CLUSTER, "--node-ip-address", ADDRESSES[1]]
        wait(lambda: self.run(0, "ray", "health-check", "--address", CLUSTER).returncode == 0, 60)
        self._rays.append(self.start(1, "ray", "start", *joins, *own))
        wait(lambda: len(self.there()["nodes"]) == 2, 60)

    def start(self, host: int, *words: str, at: Path | None = None) -> "subprocess.Popen[str]":
        """Start a command on a host, as a user does who has set nothing but the cluster's token."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_", "NCCL_", "TQ_", "ASYNCRL_"))}
        space = self.holders[host].pid
        path = f"{Path(sys.executable).parent}:{own['PATH']}"
        return subprocess.Popen(
            [
                "nsenter",
                f"--net=/proc/{space}/ns/net",
                f"--mount=/proc/{space}/ns/mnt",
                f"--wdns={at or self._folder}",
                *words,
            ],
            env={**own, "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, host: int, *words: str, at: Path | None = None) -> "subprocess.CompletedProcess[str]":
        run = self.start(host, *words, at=at)
        out, err = run.communicate(timeout=60)
        return subprocess.CompletedProcess(words, run.returncode, out, err)

    def order(self, *words: str) -> None:
        """Give an order to the link."""
        assert self._link.stdin
        assert self._link.stdout
        self._link.stdin.write(f"{' '.join(words)}\n")
        self._link.stdin.flush()
        assert self._link.stdout.readline() == "done\n"

    def train(self, folder: Path, **options: str) -> "subprocess.Popen[str]":
        folder.mkdir()
        chosen = {"cluster.layout": "apart", **options}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "asyncrl", "train", "--max-staleness", "2", "--ray-address", CLUSTER]
        return self.start(0, *command, *words, "--run-dir", "out", at=folder)

    def there(self) -> dict[str, Any]:
        """Return the living nodes, and the actors and placement groups on the cluster."""
        asked = self.run(0, sys.executable, str(HERE / "ask.py"), CLUSTER)
        return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {"nodes": [], "error": asked.stderr}

    def kill(self, host: int) -> None:
        """Kill every process of a host at once."""
        space = os.readlink(f"/proc/{self.holders[host].pid}/ns/net")
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns/net") == space:
                    os.kill(int(folder.name), signal.SIGKILL)

    def close(self) -> None:
        for host in (0, 1):
            if self.holders[host].poll() is None:
                self.kill(host)
        processes: list[subprocess.Popen[Any]] = [*self.holders, *self._rays, self._link]
        for process in processes:
            process.kill()
            process.wait(20)

    def _apart(self) -> bool:
        """Whether both hosts are whole: what holds them has its own mounts by the time that it sleeps."""
        names = [Path(f"/proc/{holder.pid}/comm").read_text(encoding="utf-8").strip() for holder in self.holders]
        return names == ["sleep", "sleep"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    yield hosts
    hosts.close()


def wait(until: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_step(folder: Path, run: "subprocess.Popen[str]", version: int, timeout_s: float = 150.0) -> None:
    def reached() -> bool:
        assert run.poll() is None, run.communicate()
        log = folder / "out/events.jsonl"
        return log.exists() and '"type":"published"' in log.read_text(encoding="utf-8") and _last(folder) >= version

    wait(reached, timeout_s)


def _last(folder: Path) -> int:
    return max((event.version for event in read_events(folder / "out") if isinstance(event, Published)), default=0)


def finish(run: "subprocess.Popen[str]", folder: Path, code: int = 0, timeout_s: float = 240.0) -> RunEnded:
    """Wait for a run's end; its ledger must be exact. Return how it ended."""
    out, err = run.communicate(timeout=timeout_s)
    assert run.returncode == code, out + err
    ledger = subprocess.run(
        [sys.executable, "-m", "asyncrl", "ledger", "out"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ledger.returncode == 0, ledger.stdout + ledger.stderr
    *_, end = read_events(folder / "out")
    assert isinstance(end, RunEnded)
    return end


def places(folder: Path) -> dict[str, str]:
    """Return the address of each part's node, as the run logged it."""
    lines = (folder / "out/log.jsonl").read_text(encoding="utf-8").splitlines()
    return next(entry["parts"] for line in lines if (entry := json.loads(line))["event"] == "places")


def is_empty(hosts: Hosts) -> bool:
    found = hosts.there()
    return found.get("actors") == [] and found["placement_groups"] == []


@pytest.mark.timeout(420)
def test_the_default_task_learns_across_nodes_and_a_link_that_is_down_for_5_s_loses_nothing(
    tmp_path: Path, hosts: Hosts
) -> None:
    folder = tmp_path / "one"
    run = hosts.train(folder, **{"run.stop_at_reward": "0.4", "run.batches": "400"})
    wait_for_step(folder, run, 5)
    hosts.order("down")
    time.sleep(5)
    hosts.order("up")
    end = finish(run, folder, timeout_s=300)
    assert "reward" in end.reason
    parts = places(folder)
    assert {parts["rank0"], parts["rank1"]}.isdisjoint({parts["collector0"]})
    assert set(parts.values()) == set(ADDRESSES)
    wait(lambda: is_empty(hosts), 20)


@pytest.mark.timeout(420)
def test_two_runs_at_once_with_20_ms_between_the_nodes_have_exact_ledgers(tmp_path: Path, hosts: Hosts) -> None:
    hosts.order("delay", "0.02")
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [hosts.train(folder, **SMALL, **{"run.steps": "5"}) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        finish(run, folder)
    hosts.order("delay", "0")
    wait(lambda: is_empty(hosts), 20)


@pytest.mark.timeout(300)
def test_a_run_whose_node_is_killed_ends_with_an_exact_ledger_and_leaves_nothing(tmp_path: Path, hosts: Hosts) -> None:
    """Last: the cluster has one node after it."""
    folder = tmp_path / "one"
    run = hosts.train(folder, **SMALL, **{"supervision.answer_timeout_s": "20", "cluster.place_timeout_s": "3"})
    wait_for_step(folder, run, 2)
    hosts.kill(1)
    end = finish(run, folder, code=1, timeout_s=200)
    assert "takes two nodes or more" in end.reason
    wait(lambda: is_empty(hosts), 30)
