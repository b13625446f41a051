"""The files that a run leaves when it has ended, and what is said of those that could not be written."""

import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.summary import FILE_NAME as SUMMARY
from asyncrl.engine.records.ending import Ending, failure

FILTERS = "filters.json"


class RunFiles:
    """Invariant: what can be written is, whatever could not, and a run with a file that could not has failed.

    `end` is told of the ending once a file fails while the run goes on.
    """

    def __init__(self, directory: Path, end: Callable[[Ending], None]) -> None:
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

    def explain(self, ending: Ending) -> None:
        """Print a line for each lost file; the first cause of another failure with traceback and where to look."""
        named = [*self._lost, *([ending.error] if isinstance(ending.error, NotWritten) else [])]
        for line in dict.fromkeys(map(str, named)):
            _say(line)
        if ending.error is not None and not isinstance(ending.error, NotWritten):
            typer.echo("".join(traceback.format_exception(ending.error)).rstrip(), err=True)
            _say(f"{ending.reason} (see {self._directory / 'log.jsonl'} and {self._directory / 'events.jsonl'})")

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
            part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._lost.append(NotWritten.of(path, error))


def _say(line: str) -> None:
    typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)
