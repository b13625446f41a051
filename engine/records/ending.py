"""How a run ended: exit code and reason."""

import traceback
from dataclasses import dataclass
from pathlib import PurePath

LIMIT_STEPS = "step limit reached"
LIMIT_BATCHES = "batch limit reached"
REWARD_REACHED = "reward reached"
DATA_EXHAUSTED = "data exhausted"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Ending:
    """`code` is the exit code: 0 done, 1 failed, 128 plus a signal's number if that signal ended the run."""

    code: int
    reason: str
    error: BaseException | None = None


def first_cause(error: BaseException) -> BaseException:
    """Return the error that came first out of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def failure(cause: BaseException) -> Ending:
    """Return the ending of a run that failed; the reason is the first line of its first cause."""
    first = f"{type(cause).__name__}: {str(cause).strip() or _place(cause)}".splitlines()[0]
    return Ending(1, "; ".join([first, *getattr(cause, "__notes__", ())]), cause)


def _place(error: BaseException) -> str:
    """Return where an error without a message was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message"
    return f"no message; raised in {frames[-1].name} ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})"
