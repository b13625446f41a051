"""Calls made in the thread that waits for a run, where the run has a thread of its own."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class CallIn(Protocol):
    """Makes a call in a thread that can what this one cannot, and returns what it returns."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


def call_here(call: Callable[[], T], /) -> T:
    """Make a call in this thread."""
    return call()
