"""Logs of a run: one JSON object a line through structlog; warnings also go to the terminal."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import typer


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write log records to `path` for the length of the context."""
    with path.open("a", encoding="utf-8") as file:
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                _show_errors,
                structlog.processors.JSONRenderer(default=repr),
            ],
            logger_factory=structlog.WriteLoggerFactory(file),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def _show_errors(_: Any, method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if method in ("error", "critical"):
        typer.echo(f"{record.get('event')}: {record}", err=True)
    return record
