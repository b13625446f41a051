"""Two runs do not share a folder, also where both begin in it at the same moment."""

from pathlib import Path

from typer.testing import CliRunner

from asyncrl.engine.cli import app
from asyncrl.engine.events.lock import LogLock


def test_a_run_whose_folder_another_process_writes_to_ends_before_it_starts_anything(folder: Path) -> None:
    """The other one has its lock and no event yet, so that the folder still looks new."""
    (folder / "out").mkdir()
    lock = LogLock(folder / "out" / "events.jsonl")
    result = CliRunner().invoke(app, ["train", "--runtime", "local", "--run-dir", "out"])
    lock.release()
    assert result.exit_code == 2
    assert "the event log in out is being written by process" in result.stderr
    assert "choose another folder (run.directory, --run-dir)" in result.stderr
    assert not (folder / "out" / "events.jsonl").exists()
