"""Logs of a run: one JSON object per line through structlog, whose settings are the caller's again afterwards."""

import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from asyncrl.engine.errors import NotWritten
from asyncrl.engine.running.output import Output


@contextmanager
def log_to(
    path: Path,
    *,
    lost: Callable[[NotWritten], None],
    complain: Callable[[str], None] | None = None,
    redact: Callable[[str], str] = str,
) -> Iterator[None]:
    """Write log records to `path` for the length of the context; `lost` is told, once, if that fails.

    Errors also go to `complain`, each as a line. `redact` is given each line before it is written.
    """

    def show(_: Any, method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if complain is not None and method in ("error", "critical"):
            complain(redact(f"{record.get('event')}: {record}"))
        return record

    with (
        _settings_restored(),
        closing(Output(path.open("a", encoding="utf-8"), lambda error: lost(NotWritten.of(path, error)))) as file,
    ):
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                show,
                structlog.processors.JSONRenderer(default=repr),
                lambda logger, method, line: redact(str(line)),
            ],
            # What the caller has set up may drop records, or keep a logger that writes elsewhere.
            wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
            context_class=dict,
            logger_factory=structlog.WriteLoggerFactory(cast(TextIO, file)),
            cache_logger_on_first_use=False,
        )
        yield


@contextmanager
def log_to_standard_error() -> Iterator[None]:
    """Leave standard output to what a command prints, for the length of the context."""
    with _settings_restored():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr), cache_logger_on_first_use=False)
        yield


@contextmanager
def _settings_restored() -> Iterator[None]:
    before = structlog.get_config() if structlog.is_configured() else None
    try:
        yield
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)
