"""Attempts of one command, which goes on by itself from the newest checkpoint of a run whose processes died.

Invariant: what fails the same way at the same step twice is not tried again, and within any window there are at most
`supervision.run_restarts` further attempts.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ActorDied, ConfigError, DataPlaneDown, Overdue
from asyncrl.engine.lifecycle.deaths import is_death
from asyncrl.engine.loop.restarts import Restarts
from asyncrl.engine.records.ending import failure
from asyncrl.engine.running.outcome import RunFailed
from asyncrl.engine.running.resume import Resumption, find


class Attempts:
    """Decides after each failure of the run in `directory` whether there is another attempt, and from where."""

    def __init__(self, config: RunConfig, directory: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        settings = config.supervision
        # In one process nothing dies alone: what failed would fail again.
        self._most = settings.run_restarts if config.run.runtime == "ray" else 0
        self._window_s = settings.restart_window_s
        self._restarts = Restarts(
            self._most, window_s=settings.restart_window_s, pause_s=settings.restart_pause_s, now=now
        )
        self._directory = directory
        self._last: tuple[int, str] | None = None

    def after(self, failed: RunFailed) -> tuple[Resumption, float]:
        """Return from where the next attempt goes on, and after how many seconds. RunFailed if there is none."""
        cause = failed.__cause__
        if not self._most or cause is None or not _is_by_death(cause):
            raise failed
        steps, what = failed.summary.steps, _kind(cause)
        if (steps, what) == self._last:
            raise self._end(failed, f"it failed so twice after step {steps}, and would again")
        self._last = steps, what
        if self._restarts.used_up:
            raise self._end(
                failed,
                f"{self._most} attempts followed within {self._window_s:g} s (supervision.run_restarts)",
            )
        try:
            found = find(self._directory)
        except ConfigError as error:
            raise self._end(failed, str(error)) from error
        if found.saved is None and steps:
            raise self._end(failed, f"{steps} steps were trained, and there is no checkpoint yet", begins_anew=True)
        pause_s, reason = self._restarts.take(), failure(cause).reason
        return replace(found, attempt=self._restarts.count + 1, cause=reason), pause_s

    def message(self, found: Resumption, pause_s: float) -> str:
        """Say what failed, which attempt comes, and from where."""
        version = 0 if found.saved is None else found.saved.version
        return (
            f"attempt {found.attempt - 1} of {self._most + 1} failed: {found.cause}; attempt {found.attempt} goes on "
            f"from step {version} ({found.checkpoint or 'the beginning: no step was trained'}) in {pause_s:g} s"
        )

    def _end(self, failed: RunFailed, why: str, *, begins_anew: bool = False) -> RunFailed:
        how = "begins anew" if begins_anew else "goes on"
        said = f"{failed}; {why}; `asyncrl train --resume {self._directory}` {how}"
        ended = RunFailed(said, failed.summary, failed.lost)
        ended.__cause__ = failed.__cause__
        return ended


def _is_by_death(error: BaseException) -> bool:
    """Whether a process died, or something fell silent; an error that living code raised would come again."""
    cause = getattr(error, "cause", None)  # Ray wraps what an actor raised.
    if isinstance(cause, Exception):
        return _is_by_death(cause)
    if isinstance(error, BaseExceptionGroup):
        return any(_is_by_death(one) for one in error.exceptions)
    of_ray = type(error).__module__.startswith("ray.exceptions") and type(error).__name__ != "RayTaskError"
    return is_death(error) or isinstance(error, DataPlaneDown | Overdue) or of_ray


def _kind(error: BaseException) -> str:
    """Return what tells a cause from another one: the actor that died, or the message without its numbers."""
    if isinstance(error, ActorDied) and error.actor:
        return f"ActorDied {error.actor}"
    return f"{type(error).__name__} {re.sub(r'[0-9]+', '#', str(error).partition(chr(10))[0])}"
