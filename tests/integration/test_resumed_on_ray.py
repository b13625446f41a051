"""A run on Ray and TransferQueue whose processes are killed, one by one and then all, and which goes on.

What dies at any moment, hangs or is slow: tests/chaos.
"""

import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import ActorRestarted, Dispatched, Event, Judged, Resumed
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay

pytestmark = pytest.mark.ray
PROMPTS = 24

TASK = f"""
from asyncrl.collectors.tasks import Task
from asyncrl.engine.records import Prompt


class Sums(Task):
    def prompts(self):
        return [Prompt(i, f"{{i}}>") for i in range({PROMPTS})]

    def score(self, prompt, response):
        return (sum(map(ord, response)) + prompt.id) % 7 / 7
"""
OPTIONS = {
    "run.batches": "null",
    "task.name": "sums.py:Sums",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "4",
    "filters": "[]",
    "collector.count": "2",
    "collector.score_processes": "0",
    "trainer.min_step_s": "0.3",
    "trainer.ranks": "1",
    "checkpoint.every_steps": "2",
}


def count(run: Path, kind: type[Event]) -> int:
    """Count the events of a type in the log of a run that goes on."""
    log, tag = run / "events.jsonl", f'"type":"{kind.__struct_config__.tag}"'
    return log.read_bytes().count(tag.encode()) if log.exists() else 0


def hit(process: Any, words: str) -> None:
    """Kill one actor of the run."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if words in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                child.send_signal(signal.SIGKILL)
                return
    raise AssertionError(f"no {words} runs")


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that it started, as a machine that goes down does."""
    with suppress(psutil.NoSuchProcess):
        driver = psutil.Process(pid)
        tree = [*driver.children(recursive=True), driver]
        for one in tree:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(tree, timeout=20)  # Until the last one is gone it may hold the lock of the log.


@pytest.mark.timeout(500)
@pytest.mark.parametrize("slicing", ["null", pytest.param("recompute", marks=pytest.mark.soak)])
def test_a_run_goes_on_when_a_collector_dies_a_rank_dies_and_everything_dies(
    tmp_path: Path, warm_python: Any, slicing: str
) -> None:
    """CASE-B1, CASE-B19, CASE-F1: each prompt is judged once per epoch over all parts, and the log of them replays.

    Also where ranks and collectors have their devices in turns.
    """
    (tmp_path / "sums.py").write_text(TASK)
    run = tmp_path / "run"
    options = {**OPTIONS, "cluster.time_slicing": slicing}
    words = ["train", "--run-dir", "run", *(f"--set={key}={value}" for key, value in options.items())]
    process = warm_python.start(tmp_path, "-m", "asyncrl", *words, ray=True)

    def await_events(kind: type[Event], more: int) -> None:
        wanted, deadline = count(run, kind) + more, time.monotonic() + 150
        while count(run, kind) < wanted:
            assert process.poll() is None, process.communicate(1.0)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    try:
        await_events(Judged, 6)
        hit(process, "CollectorActor")
        await_events(ActorRestarted, 1)
        hit(process, "RankActor")
        await_events(Resumed, 1)
        await_events(Judged, 4)
    finally:
        kill_tree(process.pid)
    epochs = count(run, Dispatched) // PROMPTS + 1
    more = [f"--set=task.epochs={epochs}", "--set=trainer.min_step_s=0"]
    done = warm_python(tmp_path, "-m", "asyncrl", "train", "--resume", "run", *more, ray=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event.attempt for event in read_events(run) if isinstance(event, Resumed)] == [2, 1]
    recording = Recording.read(run)
    prompts = {event.group: event.prompt for event in recording.events if isinstance(event, Dispatched)}
    judged = Counter(prompts[event.group] for event in recording.events if isinstance(event, Judged))
    assert judged == Counter(dict.fromkeys(range(PROMPTS), epochs))
    assert prove(recording.events).faults() == []
    assert recording.ended is not None
    assert recording.ended.keys_left == 0
    assert replay(recording).difference is None
