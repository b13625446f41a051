"""Logs of a run: one JSON object per line, through structlog; errors also go to the terminal."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
import typer

from asyncrl.engine.cli.output import Output
from asyncrl.engine.errors import NotWritten


@contextmanager
def log_to(path: Path, *, lost: Callable[[NotWritten], None]) -> Iterator[None]:
    """Write log records to `path` for the length of the context; `lost` is told, once, if that fails."""
    with closing(Output(path.open("a", encoding="utf-8"), lambda error: lost(NotWritten.of(path, error)))) as file:
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                _show_errors,
                structlog.processors.JSONRenderer(default=repr),
            ],
            logger_factory=structlog.WriteLoggerFactory(cast(TextIO, file)),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def _show_errors(_: Any, method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if method in ("error", "critical"):
        with suppress(OSError):  # A terminal that is gone.
            typer.echo(f"{record.get('event')}: {record}", err=True)
    return record
