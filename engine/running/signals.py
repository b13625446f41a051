"""The signals that end a run: the first lets it finish, the second kills, whatever runs then.

They are taken by handlers of the process, not by the event loop: a loop that user code blocks hears nothing.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# `timeout`, a closed terminal and some launchers send one signal twice, to the process and to its group:
# the second, which comes at once, would kill. Nobody presses Ctrl-C twice so fast.
_ONE_SIGNAL_S = 0.2


class EndSignals:
    """Takes SIGINT, SIGTERM and SIGHUP for the length of the context; in the main thread.

    `first` is called with the first signal, between two instructions of the main thread; `kill` with the exit
    code of the second. SIGHUP stays ignored where it was, as `nohup` wants it.
    """

    def __init__(
        self,
        first: Callable[[signal.Signals], None],
        *,
        kill: Callable[[int], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = first
        self._kill = kill or kill_everything
        self._clock = clock
        self._seen: tuple[int, float] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "EndSignals":
        found = {number: signal.getsignal(number) for number in _ENDING}
        ignored = found[signal.SIGHUP] is signal.SIG_IGN
        self._before = {number: old for number, old in found.items() if not (ignored and number == signal.SIGHUP)}
        self.install()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, old in self._before.items():
            # None: somebody's who is not Python.
            signal.signal(number, signal.SIG_DFL if old is None else old)

    def install(self) -> None:
        """Put the handlers in place: again after Ray has started, which takes SIGTERM and crashes by it."""
        for number in self._before:
            signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        now = self._clock()
        if self._seen is None:
            self._seen = number, now
            self._first(signal.Signals(number))
        elif number != self._seen[0] or now - self._seen[1] > _ONE_SIGNAL_S:
            self._kill(exit_code(number))


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal ended, as shells count it."""
    return 128 + number


def kill_everything(code: int) -> NoReturn:
    """End this process now, with every child of it."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h")  # The live table hid the cursor.
    os.write(2, b"killed\n")
    os._exit(code)
