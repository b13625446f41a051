"""What a run leaves when it has ended, where some of it cannot be written."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.cli.terminal import explain
from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.summary import Ends, summarise_log
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.running.outcome import RunFailed, Summary
from asyncrl.engine.running.run_files import RunFiles

DONE = Ending(0, "step limit reached")
SUMMARY = summarise_log(Ledger(), Progress(), Ends(), bias_warning=0.9)


def written(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_both_files_are_written_whole(tmp_path: Path) -> None:
    ending = RunFiles(tmp_path, lambda _: None).finish(DONE, {"steps": 3}, {"filters": {}})
    assert ending is DONE
    assert written(tmp_path / "summary.json") == {"steps": 3, "exit": {"code": 0, "reason": "step limit reached"}}
    assert written(tmp_path / "filters.json") == {"filters": {}}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("bad", "good"), [("summary.json", "filters.json"), ("filters.json", "summary.json")])
def test_a_file_that_cannot_be_written_fails_the_run_and_spares_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, good: str
) -> None:
    """FOUND-C11, FOUND-C15: one line with file and cause, exit code 1, also in the summary."""
    (tmp_path / bad).mkdir()
    files = RunFiles(tmp_path, lambda _: None)
    ending = files.finish(DONE, {"steps": 3}, {"filters": {}})
    explain(RunFailed(ending.reason, Summary.of(SUMMARY, tmp_path), files.lost))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / bad} could not be written: [Errno 21] Is a directory")
    assert ending.code == 1
    assert written(tmp_path / good).get("exit", {"code": 1})["code"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([bad, good])


def test_a_file_that_is_lost_ends_the_run_at_once(tmp_path: Path) -> None:
    """FOUND-C11: the first such failure is the ending, but not of a run that failed for another reason."""
    asked: list[Ending] = []
    files = RunFiles(tmp_path, asked.append)
    files.lose(NotWritten("log.jsonl could not be written: disk full"))
    assert [(ending.code, ending.reason) for ending in asked] == [
        (1, "NotWritten: log.jsonl could not be written: disk full")
    ]
    assert files.finish(DONE, {}, {}) == asked[0]
    earlier = Ending(1, "KeyError: 'x'", KeyError("x"))
    assert files.finish(earlier, {}, {}) is earlier
