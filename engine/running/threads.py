"""Where a run works: in the caller's thread, or, under an event loop such as a notebook's, in one of its own.

Only the main thread hears signals and alarms. While it waits for a run in a thread of its own it makes the calls
that are the main thread's alone.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from asyncrl.engine.aio.call_in import CallIn, call_here

T = TypeVar("T")


def run_beside_loop(work: Callable[[CallIn], T]) -> T:
    """Do blocking work that runs an event loop; in a thread of its own if this thread runs one already.

    `work` is given what makes a call in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        beside = False
    else:
        beside = True
    # Outside the handler: an error of the work would be told as one that came while another was handled.
    return _in_own_thread(work) if beside else work(call_here)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_own_thread(work: Callable[[CallIn], T]) -> T:
    calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
    outcome: Future[T] = Future()

    def call_in(call: Callable[[], Any], /) -> Any:
        answer: Future[Any] = Future()
        calls.put(partial(_answer, answer, call))
        return answer.result()

    def whole() -> None:
        _answer(outcome, partial(work, call_in))
        calls.put(None)

    # A daemon: after a second Ctrl-C nobody waits for code that does not return.
    thread = threading.Thread(target=whole, name="asyncrl-run", daemon=True)
    thread.start()
    try:
        _serve(calls)
    except KeyboardInterrupt:
        # The run has been told to let go, and may call in until it has; a further one waits for nothing.
        _serve(calls)
    thread.join()
    return outcome.result()


def _serve(calls: "SimpleQueue[Callable[[], Any] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # The thread's edge: it is raised where the answer is awaited.
        answer.set_exception(error)
