"""A run that `uv run` starts."""

import os
import subprocess
import sys
from pathlib import Path

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
