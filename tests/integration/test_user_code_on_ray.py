"""Whole runs on Ray whose task does what user code does: pools of processes, scores that hang or leave."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.long]

TASK = """
import os, re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from asyncrl.collectors.tasks import Task
from asyncrl.engine.records import Prompt

HERE = Path(__file__).parent


def once(what):
    try:
        os.close(os.open(HERE / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Fragile(Task):
    def prompts(self):
        with (HERE / "calls").open("a") as calls:
            calls.write("prompts\\n")
        with ProcessPoolExecutor(2) as pool:
            return [Prompt(id=n, text=f"{n}>") for n in pool.map(abs, range(10))]

    def score(self, prompt, response):
        if once("hung"):
            re.fullmatch(r"(a+)+", "a" * 60 + "b")
        if once("left"):
            exec("exit()")
        if once("died"):
            os._exit(3)
        return float(sum(map(ord, response)) % 2)
"""


@pytest.mark.timeout(270)
def test_scores_that_hang_or_leave_fail_their_samples_and_prompts_may_use_a_pool(
    tmp_path: Path, warm_python: Any
) -> None:
    """FOUND-C19 and FOUND-C20: the samples failed, with the task's name, within the time-out; the run goes on."""
    (tmp_path / "my_task.py").write_text(TASK, encoding="utf-8")
    settings = (
        "task.name=my_task:Fragile",
        "collector.score_timeout_s=2",
        "run.steps=3",
        "filters=[]",
        "supervision.start_timeout_s=240",
    )
    words = ["train", "--run-dir", "run", *(word for each in settings for word in ("--set", each))]
    done = warm_python(tmp_path, "-m", "asyncrl", *words, timeout_s=240, ray=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 3
    assert summary["ledger"]["failed"] == {"score_timeout": 1, "score_error": 2}
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "prompts\n"
    log = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    for said in (
        "task my_task:Fragile: score took longer than 2 s",
        "my_task:Fragile: score raised SystemExit",
        "my_task:Fragile: the process that scores ended while it scored, with exit code 3",
    ):
        assert said in log
