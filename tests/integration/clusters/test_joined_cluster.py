"""Runs that join a Ray cluster: apart from each other and from others, and nothing of them stays."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import RunEnded

pytestmark = [pytest.mark.nodes, pytest.mark.ray]

SMALL = {"trainer.ranks": "1", "collector.score_processes": "0", "supervision.start_timeout_s": "240"}
FILTER = """
from pathlib import Path

from asyncrl.filters import BaseRolloutFilter, keep


def tens(tokens):
    here = Path.cwd()
    assert here.name == "working-folder" and (here / "own.txt").read_text() == "of this run"
    return len(tokens) * 10


class Mine(BaseRolloutFilter):
    taggers = {"tens": tens}

    def judge(self, group, context):
        if (Path.cwd() / "fail").exists():
            raise RuntimeError("as asked")
        return keep()
"""


def begin(warm_python: Any, folder: Path, address: str, **options: str) -> Any:
    folder.mkdir()
    (folder / "mine.py").write_text(FILTER, encoding="utf-8")
    (folder / "random.py").write_text("raise ImportError('of the user')", encoding="utf-8")
    (folder / "own.txt").write_text("of this run", encoding="utf-8")
    chosen = {"run.batches": "4", "rollout.groups_per_step": "4", "filters": "[]", **SMALL, **options}
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    return warm_python.start(
        folder, "-m", "asyncrl", "train", "--ray-address", address, "--filter", "mine:Mine", *words, "--run-dir", "out"
    )


def ledgers(warm_python: Any, folders: Sequence[Path]) -> list[int]:
    return [warm_python(folder, "-m", "asyncrl", "ledger", "out").returncode for folder in folders]


@pytest.mark.timeout(400)
def test_two_runs_on_one_cluster_are_exact_each_and_leave_it_as_it_was(
    tmp_path: Path, warm_python: Any, raylets: Any
) -> None:
    """Each has parts on both nodes, and rows and weights cross from one to the other."""
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [begin(warm_python, folder, raylets.address, **{"cluster.layout": "apart"}) for folder in folders]
    for run in runs:
        out, err = run.communicate(300)
        assert run.returncode == 0, out + err
    assert ledgers(warm_python, folders) == [0, 0]
    raylets.wait_until_empty(20)


@pytest.mark.timeout(300)
def test_nothing_stays_of_a_run_that_fails_or_whose_driver_is_killed(
    tmp_path: Path, warm_python: Any, raylets: Any
) -> None:
    killed = begin(warm_python, tmp_path / "killed", raylets.address, **{"run.batches": "null"})
    log = tmp_path / "killed/out/events.jsonl"
    deadline = time.monotonic() + 150
    while not (log.exists() and '"published"' in log.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline
        assert killed.poll() is None, killed.communicate(1)
        time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    raylets.wait_until_empty(30)
    killed.kill()
    failing = tmp_path / "failing"
    run = begin(warm_python, failing, raylets.address)
    (failing / "fail").touch()
    out, err = run.communicate(200)
    assert run.returncode == 1, out + err
    *_, end = read_events(failing / "out")
    assert isinstance(end, RunEnded)
    assert "as asked" in end.reason
    raylets.wait_until_empty(20)


@pytest.mark.timeout(200)
def test_a_run_without_room_says_what_does_not_fit(tmp_path: Path, warm_python: Any, raylets: Any) -> None:
    large = {"trainer.ranks": "9", "cluster.place_timeout_s": "2"}
    run = begin(warm_python, tmp_path / "large", raylets.address, **large)
    out, err = run.communicate(100)
    assert run.returncode == 1, out + err
    assert "no place on the Ray cluster after 2 s (cluster.place_timeout_s): there is no room for" in err
    assert "127.0.0.1 has 0 of 4 CPUs" in err
    raylets.wait_until_empty(20)
