"""A whole `asyncrl train` on Mooncake learns as the default run does, and leaves nothing running."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.timeout(300)
def test_a_run_on_mooncake_ends_well_and_leaves_no_process(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, "-m", "asyncrl", "train", "--max-staleness", "2", "--run-dir", str(tmp_path / "run")]
    options = ["data_plane.backend=mooncake", "data_plane.mooncake_segment_gib=0.25", "data_plane.storage_units=2"]
    for option in options:
        command += ["--set", option]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["data_plane_keys_left"] == 0
    left = [p.name() for p in psutil.process_iter() if p.pid not in before and "mooncake" in " ".join(p.cmdline())]
    assert left == []
    ledger = subprocess.run(
        [sys.executable, "-m", "asyncrl", "ledger", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert ledger.returncode == 0, ledger.stdout + ledger.stderr


KILLED = """
import time
from asyncrl.engine.data_plane.mooncake_service import MooncakeMaster
from asyncrl.engine.lifecycle.process_env import prepared

with prepared(threads=1):
    print(MooncakeMaster("127.0.0.1", 20)._process.pid, flush=True)
    time.sleep(60)
"""


def test_the_master_of_a_driver_that_was_killed_goes_at_the_next_start_and_no_other() -> None:
    from asyncrl.engine.data_plane.mooncake_service import MooncakeMaster
    from asyncrl.engine.lifecycle.orphans import end_orphans

    own = MooncakeMaster("127.0.0.1", 20)
    try:
        with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout
            left = int(driver.stdout.readline())
            driver.kill()
        assert psutil.pid_exists(left)
        assert left in end_orphans()
        assert own._process.poll() is None
    finally:
        own.close()
