"""A run that `uv run` starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
from asyncrl.engine.lifecycle.process_env import prepare
prepare(1)
import ray._private.worker as worker
print(worker._maybe_modify_runtime_env({"env_vars": {}}, False))
"""


def test_ray_gives_its_workers_the_environment_that_uv_run_gave_the_driver(tmp_path: Path) -> None:
    """FOUND-C18: Ray looks for a parent that is called `uv run`, as this shell is, and would start workers by uv."""
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    (tmp_path / "run").write_text(f"{sys.executable} driver.py; true\n", encoding="utf-8")
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        ["uv", "run"],
        executable="/bin/sh",
        cwd=tmp_path,
        env=fresh,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "{'env_vars': {}}\n", done.stderr


@pytest.mark.ray
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
@pytest.mark.timeout(270)
def test_uv_run_starts_a_run_on_ray_from_a_folder_with_a_large_file(tmp_path: Path) -> None:
    """FOUND-C18: nothing of the folder is packed up, and no worker waits for uv."""
    with (tmp_path / "checkpoint.bin").open("wb") as file:
        file.truncate(10**9)
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    fresh |= {"VIRTUAL_ENV": sys.prefix, "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
    fresh["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{fresh['PATH']}"
    patient = ("--set", "supervision.start_timeout_s=240", "--set", "trainer.ranks=1")
    done = subprocess.run(
        ["uv", "run", "asyncrl", "train", "--run-dir", "run", "--set", "run.steps=1", *patient],
        cwd=tmp_path,
        env=fresh,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["steps"] == 1
