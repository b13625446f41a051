"""A wall clock that is set while a run goes on changes no limit, no lease and no number of seconds."""

import re
from pathlib import Path

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.summary import Ends, summarise_log
from asyncrl.engine.events.types import RunEnded, RunStarted

ROOT = Path(__file__).parents[4]
WALL = re.compile(
    r"\btime\.(time|time_ns|strftime|localtime|gmtime|ctime)\b|\.(utcnow|today)\(|datetime\.now\(|st_[mc]time"
)
KNOWN = {
    "engine/run.py": "what the events say for people to read",
    "engine/evaluate.py": "the same",
    "engine/model/smollm2.py": "how much older a folder is than another",
    "engine/running/host.py": "when a process began, for the seconds before its log",
    "engine/running/resume.py": "which run was written to last (--resume auto)",
    "engine/cli/train.py": "the name of a new folder",
    "engine/lifecycle/roster.py": "when a node that is drained will be gone, which Ray tells by that clock",
}
"""Where the wall clock is read, and for what; everything else takes a clock that only goes forward."""


def test_only_what_people_read_comes_from_the_wall_clock() -> None:
    """Leases, limits, time-outs and retries count on `time.monotonic`, anyio's clock, or one that is injected."""
    rooms = ("engine", "collectors", "filters", "trainers", "configs")
    found = {
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if WALL.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(KNOWN)


def test_seconds_are_right_when_the_clock_is_set_an_hour_back_and_a_day_ahead() -> None:
    walls, seconds = iter([1000.0, 1000.0 - 3600, 1000.0 + 86_400]), iter([0.0, 1.0, 5.0, 9.0])
    progress, ends, ledger = Progress(), Ends(), Ledger()
    log = EventLog(clock=lambda: next(seconds), wall=lambda: next(walls), folds=[progress, ends, ledger])
    log.append(RunStarted(schema=3, config={}, software={}, process_wall=997.0))
    log.append(RunEnded(code=0, reason="step limit reached"))
    summary = summarise_log(ledger, progress, ends)
    assert summary["seconds_total"] == 3.0 - 1.0 + 5.0
