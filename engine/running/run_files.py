"""The folder of a run, the files that it leaves when it has ended, and which of them could not be written."""

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.configs import Loaded
from asyncrl.engine.errors import ConfigError, NotWritten
from asyncrl.engine.events.segments import FILE_NAME as EVENTS
from asyncrl.engine.events.summary import FILE_NAME as SUMMARY
from asyncrl.engine.records.ending import Ending, failure

FILTERS = "filters.json"


def name_of_directory(loaded: Loaded, directory: Path) -> str:
    """Return what messages call a new run's folder; ConfigError if another one is configured."""
    configured = loaded.config.run.directory
    if configured is None:
        return "directory"
    named = loaded.sources["run.directory"]
    if Path(configured) != directory:
        raise ConfigError(
            f"run.directory (from {named}) is {configured!r}, and the directory given is {str(directory)!r}; "
            "leave run.directory out"
        )
    return named


def check_directory(directory: Path, *, named: str) -> None:
    """Check that `make_directory` would make this folder, and leave nothing behind; ConfigError if not."""
    try:
        _check_free(directory, named=named)
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        # Permissions alone say nothing of what root can do, or of file systems like /proc.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{named}: cannot make the folder {directory}: {error.strerror}") from error


def make_directory(directory: Path, *, named: str) -> Path:
    """Make a run's folder; ConfigError that calls it `named` if it holds a run already, or cannot be made."""
    try:
        _check_free(directory, named=named)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named}: cannot make the folder {directory}: {error}") from error
    return directory


def _check_free(directory: Path, *, named: str) -> None:
    if (directory / EVENTS).exists():
        raise ConfigError(f"{named} is {str(directory)!r}, which holds a run already; name a new folder")


class RunFiles:
    """Invariant: what can be written is, whatever could not, and a run with a file that could not has failed.

    `end` is told of the ending once a file fails while the run goes on.
    """

    def __init__(self, directory: Path, end: Callable[[Ending], None], *, redact: Callable[[str], str] = str) -> None:
        self._redact = redact
        self._directory = directory
        self._end = end
        self._lost: list[NotWritten] = []

    def lose(self, error: NotWritten) -> None:
        """Note a file that cannot be written, and end the run in order."""
        self._lost.append(error)
        self._end(failure(error))

    def finish(self, ending: Ending, summary: dict[str, Any], filter_state: Mapping[str, Any]) -> Ending:
        """Write summary and state of filters; return the ending, a failure if a file of the run was lost.

        The summary comes first: it says more of a run than the state of its filters does.
        """
        ending = self._judge(ending, summary)
        self._save(SUMMARY, summary)
        self._save(FILTERS, filter_state)
        final = self._judge(ending, summary)
        if final is not ending:
            self._save(SUMMARY, summary)
        return final

    @property
    def lost(self) -> tuple[NotWritten, ...]:
        """What could not be written, in order, each cause once."""
        return tuple({str(error): error for error in self._lost}.values())

    def _judge(self, ending: Ending, summary: dict[str, Any]) -> Ending:
        if self._lost and ending.code != 1:
            ending = failure(self._lost[0])
        summary["exit"] = {"code": ending.code, "reason": ending.reason}
        return ending

    def _save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file whole or not at all."""
        path = self._directory / name
        part = path.with_name(f"{name}.part")
        try:
            part.write_text(self._redact(json.dumps(content, indent=2)) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._lost.append(NotWritten.of(path, error))
