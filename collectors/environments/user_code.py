"""Calls of a user's environment and tools: each ends with an answer or a fault, and takes no sibling with it."""

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from asyncrl.engine.errors import AsyncRLError

ENVIRONMENT_ERROR = "environment_error"
ENVIRONMENT_TIMEOUT = "environment_timeout"
TOOL_ERROR = "tool_error"
TOOL_TIMEOUT = "tool_timeout"


class Fault(AsyncRLError, RuntimeError):
    """What went wrong in a call: `cause` is the reason of a fate, `what` a sentence, the text has the traceback too."""

    def __init__(self, cause: str, what: str, trace: str = "") -> None:
        super().__init__(f"{what}\n{trace}" if trace else what)
        self.cause = cause
        self.what = what


async def answer_of(
    call: Callable[[], Awaitable[Any]], *, name: str, limit_s: float, limit_name: str, causes: tuple[str, str]
) -> Any:
    """Return what a call gives within `limit_s`; Fault, with the first of `causes` or, if it is late, the second."""
    answers: list[Any] = []
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            answers.append(await call())
        except anyio.get_cancelled_exc_class():
            raise  # Ours or leaked: told apart below.
        except BaseException as error:  # The edge of user code.
            errors.append(error)

    # A cancellation that leaks from a client of the user's ends the innermost task group, and nothing else.
    with anyio.move_on_after(limit_s) as limit:
        async with anyio.create_task_group() as own:
            own.start_soon(run)
    if answers:
        return answers[0]
    if errors:
        trace = "".join(traceback.format_exception(errors[0], limit=-5)).rstrip()
        raise Fault(causes[0], f"{name} raised {errors[0]!r}", trace)
    if limit.cancel_called:
        raise Fault(causes[1], f"{name} took longer than {limit_s:g} s ({limit_name})")
    raise Fault(causes[0], f"{name} was cancelled by its own code: a cancellation came out of it")
