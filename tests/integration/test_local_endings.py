"""How runs in one process end when something outside them, or in the user's code, goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LOCAL = ["train", "--runtime", "local", "--run-dir", "out"]
ON_A_FULL_DISK = """
import resource, sys
from asyncrl.engine.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
main()
"""


def check_whole(folder: Path, code: int, reason: str) -> dict[str, Any]:
    """The summary says how it ended, every sample has a fate, and no key is left."""
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["exit"]["code"], reason in summary["exit"]["reason"]) == (code, True), summary["exit"]
    ledger = summary["ledger"]
    assert [ledger[place] for place in ("in_flight", "buffered", "claimed", "in_training")] == [0, 0, 0, 0]
    assert summary["data_plane_keys_left"] == 0
    return summary


def test_a_full_disk_is_one_line_and_what_can_be_written_is(tmp_path: Path, warm_python: Any) -> None:
    """FOUND-C11: no file may grow over 300 kB, as if the disk were full; the event log is the first that wants to."""
    run = warm_python(tmp_path, "-c", ON_A_FULL_DISK, *LOCAL)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert line == "error: out/events.jsonl could not be written: [Errno 27] File too large"
    assert check_whole(tmp_path, 1, "out/events.jsonl could not be written")["steps"] > 0
    assert (tmp_path / "out" / "filters.json").exists()


def test_a_filter_that_exits_fails_the_run_with_its_name(tmp_path: Path, warm_python: Any) -> None:
    """FOUND-C14: never exit code 0."""
    (tmp_path / "my_filter.py").write_text(
        "import sys\n"
        "from asyncrl.filters import BaseRolloutFilter\n"
        "class Exits(BaseRolloutFilter):\n"
        "    def judge(self, group, context):\n"
        "        sys.exit(0)\n",
        encoding="utf-8",
    )
    run = warm_python(tmp_path, "-m", "asyncrl", *LOCAL, "--filter", "my_filter:Exits")
    assert (run.returncode, "filter Exits raised SystemExit(0)" in run.stderr) == (1, True), run.stderr
    check_whole(tmp_path, 1, "filter Exits raised SystemExit(0)")
    assert '"type":"run_ended"' in (tmp_path / "out" / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1]


def test_a_reader_of_the_output_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """FOUND-C11: as in `asyncrl train | head -1`."""
    command = [str(Path(sys.executable).with_name("asyncrl")), *LOCAL, "--steps", "3"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(90) == 0
    check_whole(tmp_path, 0, "step limit reached")


@pytest.mark.timeout(90)
def test_the_second_signal_kills_a_run_whose_loop_a_reward_blocks(tmp_path: Path, warm_python: Any) -> None:
    """FOUND-C7: `runtime: local` scores in the loop's own thread."""
    (tmp_path / "my_task.py").write_text(
        "import pathlib, time\n"
        "from asyncrl.collectors.tasks import Task\n"
        "from asyncrl.engine.records import Prompt\n"
        "class Blocks(Task):\n"
        "    def prompts(self):\n"
        "        return [Prompt(0, 'a>', 'a', 'mine')]\n"
        "    def score(self, prompt, response):\n"
        "        pathlib.Path('blocks').touch()\n"
        "        time.sleep(1000)\n",
        encoding="utf-8",
    )
    run = warm_python.start(tmp_path, "-m", "asyncrl", *LOCAL, "--set", "task.name=my_task:Blocks")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "blocks").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert run.wait(10) == 143
    finally:
        run.kill()
    assert not os.path.exists(tmp_path / "out" / "summary.json")
