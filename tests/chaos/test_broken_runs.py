"""Real runs on Ray and TransferQueue whose processes are killed, suspended and slowed down at seeded moments.

CASE-B1 (a collector that dies), CASE-B8 (work that vanishes), CASE-B19 (a rank that dies), CASE-E6 (keys left after a
failure) and CASE-F1 (a resume that skips or repeats prompts), CASE-F4 (ages after a resume), at any moment and in any
order. A fault of the product that these find ships the seed that shows it.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def chaos(folder: Path, *words: str) -> dict[str, Any]:
    """Run `scripts/chaos`; return its JSON line, with the report's text as `report`."""
    command = [str(ROOT / "scripts" / "chaos"), "--warm", "--folder", str(folder), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout, done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**line, "code": done.returncode, "report": (folder / "report.md").read_text(encoding="utf-8")}


def check(line: dict[str, Any], faults: int) -> None:
    assert line["faults"] == line["recovered"] + line["failed_cleanly"] == faults, line["report"]
    wrong = {name: line[name] for name in ("lost", "twice", "hangs", "wrong", "left", "unprovoked")}
    assert not any(wrong.values()), line["report"]
    assert line["code"] == 0


@pytest.mark.chaos
@pytest.mark.timeout(700)
def test_twenty_faults_lose_nothing(tmp_path: Path) -> None:
    """Every part is killed once, and the rest is drawn."""
    check(chaos(tmp_path, "--faults", "20", "--seed", "1"), 20)


@pytest.mark.soak
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("seed", range(2, 12))
def test_two_hundred_faults_lose_nothing(tmp_path: Path, seed: int) -> None:
    check(chaos(tmp_path, "--faults", "20", "--seed", str(seed)), 20)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_half_an_hour_of_small_steps_leaves_everything_flat(tmp_path: Path) -> None:
    """CASE-E12: memory, open files and threads of every process, and the rows of the store."""
    done = subprocess.run(
        [ROOT / "scripts" / "soak", "--minutes", "30", "--folder", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
