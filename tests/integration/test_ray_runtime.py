"""Whole runs on Ray and TransferQueue through the installed command, and how they end."""

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

import psutil
import pytest

from asyncrl.engine.trace.loss_inputs import load

pytestmark = pytest.mark.ray
COMMAND = str(Path(sys.executable).parent / "asyncrl")

FILTER = """
from asyncrl.filters import BaseRolloutFilter, drop, keep


class EvenPrompts(BaseRolloutFilter):
    requires = ("prompt",)

    def judge(self, group, context):
        return drop("odd") if group.meta.prompt % 2 else keep()
"""


class Run:
    """A run of `asyncrl train` in a folder of its own, in its own process group: warm, or as the installed command."""

    def __init__(self, folder: Path, *arguments: str, warm: Any = None) -> None:
        self.folder = folder
        self.directory = folder / "run"
        words = ("train", "--run-dir", "run", *arguments)
        self.process: Any = (
            warm.start(folder, "-m", "asyncrl", *words, ray=True)
            if warm
            else subprocess.Popen(
                [COMMAND, *words],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        self.children: list[psutil.Process] = []

    def wait_for(self, event: str, timeout_s: float = 150) -> None:
        """Wait until the event log has an event of this type; note the processes that run then."""
        deadline = time.monotonic() + timeout_s
        log = self.directory / "events.jsonl"
        while time.monotonic() < deadline and self.process.poll() is None:
            if log.exists() and f'"type":"{event}"' in log.read_text(encoding="utf-8", errors="replace"):
                break
            time.sleep(0.2)
        with suppress(psutil.NoSuchProcess):  # It has ended too early, and `finish` tells why.
            self.children = psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, timeout_s: float = 200) -> tuple[int, str, dict[str, Any]]:
        output = "".join(self.process.communicate(timeout=timeout_s))
        assert (self.directory / "summary.json").exists(), (self.process.returncode, output)
        summary = json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        return self.process.returncode, output, summary

    def left(self) -> list[str]:
        """Return what still runs of the run's processes, after a moment to die."""
        _, alive = psutil.wait_procs(self.children, timeout=10)
        found = []
        for process in alive:
            with suppress(psutil.NoSuchProcess):  # Gone since it was listed: it is not left.
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()[:2]))
        return found

    def named(self, words: str) -> psutil.Process:
        """Return a living process of the run whose command line has `words`."""
        for process in self.children:
            with suppress(psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process of the run is a {words}")

    def listening(self) -> set[str]:
        """Return the addresses that the run's processes listen on."""
        found = set()
        for process in (psutil.Process(self.process.pid), *self.children):
            with suppress(psutil.NoSuchProcess):  # A worker that ends just now listens to nobody.
                connections = process.net_connections(kind="inet")
                found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        for child in run.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def version_of(run: Run) -> int:
    """Return the version of the model that a run has left, loaded by transformers."""
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run.directory / "model").num_parameters() > 0
    return int(json.loads((run.directory / "model" / "asyncrl.json").read_text(encoding="utf-8"))["version"])


@pytest.mark.timeout(400)
def test_a_short_run_with_a_filter_from_the_users_folder(tmp_path: Path, runs: list[Run], warm_python: Any) -> None:
    """Two ranks, one collector, TransferQueue: the ledger balances, ages are bounded, only loopback listens.

    Its log replays, and gives back the loss inputs of a step. What it learned is saved while it trains and at its end.
    """
    (tmp_path / "my_filter.py").write_text(FILTER, encoding="utf-8")
    options = ("--max-staleness", "2", "--filter", "my_filter:EvenPrompts", "--record", "tensors")
    small = ("run.batches=8", "run.save_every=3", "run.reward_window=4", "filters=[{name: staleness}]")
    run = Run(tmp_path, *options, *(word for option in small for word in ("--set", option)))
    runs.append(run)
    run.wait_for("step_ended")
    listening = run.listening()
    code, output, summary = run.finish()
    assert code == 0, output
    assert summary["exit"] == {"code": 0, "reason": "batch limit reached"}
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(sum(ledger[kind].values()) for kind in ("masked", "dropped", "failed"))
    assert ledger["dispatched"] == ended
    assert ledger["dropped"]["EvenPrompts/odd"] > 0
    assert summary["filters"]["EvenPrompts"]["dropped"]["EvenPrompts/odd"] * 16 == ledger["dropped"]["EvenPrompts/odd"]
    assert [ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]
    assert summary["data_plane_keys_left"] == 0
    assert 0 <= summary["trained_age_max"] <= 2
    assert summary["steps"] > 0
    assert run.left() == []
    words = ["replay", "run", "--step", "1", "--out", "step.safetensors"]
    replayed = warm_python(tmp_path, "-m", "asyncrl", *words)
    assert (replayed.returncode, replayed.stdout.partition(":")[0]) == (0, "identical"), replayed.stdout
    inputs = load(tmp_path / "step.safetensors")
    assert sum(len(rows.tokens) for rank in inputs.rows for rows in rank if not rows.filler) >= 16
    assert (summary["model"]["failed_saves"], version_of(run)) == (0, summary["steps"])
    assert (run.directory / "log.jsonl").read_text(encoding="utf-8").count("the model is saved") > 1
    answered = warm_python(tmp_path, "-m", "asyncrl", "generate", "run", "7>", "--best")
    assert answered.returncode == 0, answered.stderr


@pytest.mark.timeout(270)
@pytest.mark.parametrize("actor", ["CollectorActor", pytest.param("RankActor", marks=pytest.mark.long)])
def test_an_actors_death_ends_the_run_in_seconds_with_its_name(
    tmp_path: Path, runs: list[Run], warm_python: Any, actor: str
) -> None:
    """CASE-B1, invariant 9: without restarts, exit 1, the first cause, and nothing left behind."""
    never = ("--set", "supervision.restarts=0", "--set", "supervision.run_restarts=0")
    run = Run(tmp_path, *never, warm=warm_python)
    runs.append(run)
    run.wait_for("batch_judged")
    run.named(actor).kill()
    killed = time.monotonic()
    code, output, summary = run.finish()
    assert time.monotonic() - killed < 30
    assert code == 1
    assert summary["exit"]["reason"].startswith("ActorDied: ")
    assert ("collector0" if actor == "CollectorActor" else "rank") in summary["exit"]["reason"]
    assert "error: ActorDied" in output
    assert summary["data_plane_keys_left"] == 0
    assert run.left() == []


@pytest.mark.timeout(270)
@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.long),
        (signal.SIGTERM, 143, "interrupted by SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "interrupted by SIGHUP", marks=pytest.mark.long),
    ],
)
def test_a_signal_finishes_the_step_settles_and_ends_with_its_code(
    tmp_path: Path, runs: list[Run], warm_python: Any, number: signal.Signals, code: int, reason: str
) -> None:
    """FOUND-C8: also SIGTERM, which Ray takes for itself, and a terminal that closes under all of the processes."""
    run = Run(tmp_path, warm=warm_python)
    runs.append(run)
    run.wait_for("step_started")
    if number == signal.SIGTERM:
        run.process.send_signal(number)
    else:
        os.killpg(run.process.pid, number)
    got, output, summary = run.finish()
    assert (got, summary["exit"]) == (code, {"code": code, "reason": reason}), output
    ledger = summary["ledger"]
    assert [ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]
    assert ledger["dropped"]["run_ended"] > 0
    assert summary["data_plane_keys_left"] == 0
    assert version_of(run) == summary["steps"]
    assert '"type":"run_ended"' in (run.directory / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert run.left() == []
