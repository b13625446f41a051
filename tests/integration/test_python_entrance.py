"""`asyncrl` from Python, as a user writes it: scripts and notebooks of a few lines, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

THREE_LINES = """
import asyncrl
summary = asyncrl.run("default", "runs/first", {"run.runtime": "local", "run.stop_at_reward": 0.9})
print(summary.reward_first_10, summary.reward_last_10)
"""

OWN_FILTER = """
import asyncrl
class ShortOnly(asyncrl.BaseRolloutFilter):
    def __init__(self, longest):
        self.longest = longest
    def judge(self, group, context):
        return asyncrl.keep() if sum(group.lengths) <= self.longest else asyncrl.drop("too_long")
options = {"run.runtime": "local", "run.batches": 12, "filters": []}
summary = asyncrl.run("default", "runs/short", options, filters=[ShortOnly(31)])
print(summary.ledger["dropped"]["ShortOnly/too_long"], summary.ledger["trained"])
"""

# A user's environment, without what the tests prepare.
PREPARED = ("RAY_", "TQ_", "OMP_", "GLOO_")

TWICE_ON_RAY = f"""
import os
import psutil
for name in [name for name in os.environ if name.startswith({PREPARED})]:
    del os.environ[name]
"""
TWICE_ON_RAY += """
import asyncrl

def parity(tokens):
    return len(tokens) % 2

class Odd(asyncrl.BaseRolloutFilter):
    taggers = {"parity": parity}
    requires = ("parity",)
    def judge(self, group, context):
        return asyncrl.mask([i for i, odd in enumerate(group.tag("parity")) if odd], "odd", keep_reward=True)

before = {*psutil.Process().children(recursive=True)}
for name in ("a", "b"):
    small = {"run.batches": 3, "rollout.groups_per_step": 4, "rollout.group_size": 4, "filters": []}
    summary = asyncrl.run("default", name, small, filters=[Odd()])
    print(summary.exit_code, summary.steps, summary.ledger["masked"].get("Odd/odd", 0), summary.data_plane_keys_left)
import ray
left = {'OMP_WAIT_POLICY', 'TQ_NUM_THREADS', 'RAY_USAGE_STATS_ENABLED'} & os.environ.keys()
print(left, ray.is_initialized(), [p.name() for p in {*psutil.Process().children(recursive=True)} - before])
"""


FOREIGN_RAY = """
import ray
import asyncrl
try:
    asyncrl.run("default", "out")
except asyncrl.ConfigError as error:
    print(error)
"""


def in_a_cell(code: str) -> str:
    """Return code that runs other code as a notebook's cell, in a loop that runs."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    return f"import asyncio\nasync def cell():\n{body}asyncio.run(cell())\n"


def script(code: str, folder: Path, *, timeout_s: float = 110) -> list[str]:
    """Run code in the user's folder, as a script of a fresh Python; return the lines that it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREPARED)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_three_lines_train_the_default_task(tmp_path: Path) -> None:
    (line,) = script(in_a_cell(THREE_LINES), tmp_path)
    first, last = map(float, line.split())
    assert first < 0.1
    assert last >= 0.9
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text(encoding="utf-8"))
    assert summary["exit"]["reason"] == "reward reached"


@pytest.mark.parametrize("notebook", [False, True])
def test_a_filter_object_with_a_parameter_drops_in_the_users_script(
    tmp_path: Path, warm_python: Any, notebook: bool
) -> None:
    done = warm_python(tmp_path, "-c", in_a_cell(OWN_FILTER) if notebook else OWN_FILTER)
    assert done.returncode == 0, done.stderr
    dropped, trained = map(int, done.stdout.split())
    assert dropped > 0
    assert trained > 0


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(200)
def test_two_runs_on_ray_follow_each_other_in_one_process(tmp_path: Path, warm_python: Any) -> None:
    """A filter object of the script has its tagger, which only the script knows, run by the collectors."""
    done = warm_python(tmp_path, "-c", TWICE_ON_RAY, timeout_s=180, ray=True)
    assert done.returncode == 0, done.stderr
    *runs, after = done.stdout.splitlines()
    for line in runs:
        code, steps, masked, left = map(int, line.split())
        assert (code, left) == (0, 0)
        assert steps > 0
        assert masked > 0
    assert after == "set() False []"


def test_a_foreign_ray_is_refused(tmp_path: Path) -> None:
    (line,) = script(FOREIGN_RAY, tmp_path)
    assert "has imported ray before the run" in line
    assert not (tmp_path / "out").exists()
