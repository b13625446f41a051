"""Runs whose folder is on a disk that gets full: a small one, mounted for the test."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl import RunFailed
from asyncrl.engine.checkpoint import folder as on_disk
from asyncrl.engine.events.log import read_events
from asyncrl.engine.events.types import Checkpointed

from .conftest import Small

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk of so many KiB as the run's folder, `out`."""
    out = tmp_path / "out"

    def mount(kib: int) -> Path:
        out.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", out], check=False)
        if done.returncode:
            pytest.skip("mounting a small disk is not permitted here; tests/integration has a limit on files instead")
        return out

    yield mount
    subprocess.run(["umount", "-l", out], check=False, capture_output=True)


def logged(out: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == event]


def test_checkpoints_without_room_cost_a_warning_and_the_run_goes_on_and_can_be_resumed(
    small: Small, disk: Disk
) -> None:
    """A checkpoint has 1.3 MB. There is room for two; the third leaves what there is to the log."""
    out = disk(3600)
    options = {"run.batches": None, "run.steps": 6, "checkpoint.every_steps": 1, "run.save_model": False}
    summary = small(options)
    assert (summary.exit_code, summary.steps) == (0, 6)
    warned = logged(out, "a checkpoint could not be made")
    assert warned
    assert all("/checkpoints/v00000" in line["error"] and " free" in line["error"] for line in warned), warned
    whole = on_disk.newest_first(out / "checkpoints")
    assert len(whole) == 2
    for folder in whole:
        on_disk.check(folder)
    assert {path.name for path in (out / "checkpoints").iterdir()} == {path.name for path in whole}
    made = [event.version for event in read_events(out) if isinstance(event, Checkpointed)]
    assert made == [1, 2, 3, 4, 5, 6]
    more = {**options, "run.steps": 8, "checkpoint.every_steps": None, "checkpoint.at_end": False}
    resumed = small(more, resume=True)
    assert (resumed.exit_code, resumed.steps) == (0, 8)


def test_a_first_checkpoint_that_fills_the_disk_takes_nothing_with_it(small: Small, disk: Disk) -> None:
    """What was written of it goes again, and the log has the room."""
    out = disk(900)
    summary = small({"checkpoint.every_steps": 1, "run.save_model": False})
    assert summary.exit_code == 0
    assert " MB are free" in logged(out, "a checkpoint could not be made")[0]["error"]
    assert list((out / "checkpoints").iterdir()) == []


def test_an_event_log_without_room_ends_the_run_with_the_cause(small: Small, disk: Disk) -> None:
    disk(200)
    with pytest.raises(RunFailed, match=r"events\.jsonl could not be written: .*No space left on device"):
        small({"run.batches": 400, "run.save_model": False, "checkpoint.every_steps": None, "checkpoint.at_end": False})
