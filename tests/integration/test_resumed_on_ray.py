"""A run on Ray and TransferQueue whose processes are all killed, and which goes on."""

import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.engine.events.types import Dispatched, Judged, Resumed
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay

pytestmark = pytest.mark.ray
COMMAND = str(Path(sys.executable).parent / "asyncrl")
PROMPTS = 60

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
    "task.epochs": "1",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "4",
    "filters": "[]",
    "trainer.min_step_s": "0.3",
    "trainer.ranks": "1",
    "checkpoint.every_steps": "2",
}


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """SIGKILL a process and all that it started, as a machine that goes down does."""
    for child in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


@pytest.mark.timeout(500)
def test_a_run_whose_whole_tree_is_killed_goes_on_with_each_prompt_judged_once(tmp_path: Path) -> None:
    """CASE-F1 at bound 2, with groups in TransferQueue and on their way to it."""
    (tmp_path / "sums.py").write_text(TASK)
    words = [COMMAND, "train", "--run-dir", "run", *(f"--set={key}={value}" for key, value in OPTIONS.items())]
    log = (tmp_path / "out.txt").open("w")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log, text=True, start_new_session=True)
    deadline = time.monotonic() + 200
    try:
        while not (tmp_path / "run/checkpoints/v000004").exists():
            assert process.poll() is None, (tmp_path / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        kill_tree(process)
    resumed = subprocess.run(
        [COMMAND, "train", "--resume", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    recording = Recording.read(tmp_path / "run")
    assert sum(isinstance(event, Resumed) for event in recording.events) == 1
    prompts = {event.group: event.prompt for event in recording.events if isinstance(event, Dispatched)}
    judged = Counter(prompts[event.group] for event in recording.events if isinstance(event, Judged))
    assert judged == Counter(range(PROMPTS))
    assert prove(recording.events).faults() == []
    assert recording.ended is not None
    assert recording.ended.keys_left == 0
    assert replay(recording).difference is None
