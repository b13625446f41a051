"""The signals that end a run: once in order, twice at once."""

import signal
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from asyncrl.engine.running.signals import EndSignals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ends:
    """What was asked for: the first signal, and exit codes of kills. Time is what the test says."""

    def __init__(self) -> None:
        self.first: list[signal.Signals] = []
        self.killed: list[int] = []
        self.now = 0.0

    def taken(self) -> EndSignals:
        return EndSignals(self.first.append, kill=self.killed.append, clock=lambda: self.now)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Whatever the test does to handlers is undone."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield Ends()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_ends_in_order_and_the_second_kills(ends: Ends, number: signal.Signals, code: int) -> None:
    """FOUND-C8: each of the three, with the exit code of its own."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = {n: signal.getsignal(n) for n in SIGNALS}
    with ends.taken():
        signal.raise_signal(number)
        assert (ends.first, ends.killed) == ([number], [])
        ends.now = 1.0
        signal.raise_signal(number)
        assert (ends.first, ends.killed) == ([number], [code])
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_one_signal_that_is_sent_twice_is_one(ends: Ends) -> None:
    """FOUND-C8: `timeout` sends to the process and to its group, at once; another signal is a second one."""
    with ends.taken():
        signal.raise_signal(signal.SIGTERM)
        ends.now = 0.01
        signal.raise_signal(signal.SIGTERM)
        assert ends.killed == []
        signal.raise_signal(signal.SIGINT)
        assert ends.killed == [130]


def test_the_second_signal_kills_while_user_code_blocks_the_loop(ends: Ends) -> None:
    """FOUND-C7: no turn of the event loop is needed for it."""

    async def block() -> None:
        signal.raise_signal(signal.SIGINT)
        ends.now += 1
        signal.raise_signal(signal.SIGTERM)
        assert ends.killed == [143]  # Here, where nothing has been awaited.

    with ends.taken():
        anyio.run(block)
    assert ends.first == [signal.SIGINT]


def test_a_hangup_that_was_ignored_stays_so(ends: Ends) -> None:
    """FOUND-C8: as `nohup` wants it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ends.taken() as taken:
        taken.install()
        signal.raise_signal(signal.SIGHUP)
    assert (ends.first, signal.getsignal(signal.SIGHUP)) == ([], signal.SIG_IGN)


def test_a_handler_that_took_its_place_is_replaced(ends: Ends) -> None:
    """FOUND-C8: Ray takes SIGTERM when it starts, and its handler dumps core."""
    stolen: list[Any] = []
    with ends.taken() as taken:
        signal.signal(signal.SIGTERM, lambda *_: stolen.append(1))
        taken.install()
        signal.raise_signal(signal.SIGTERM)
    assert (ends.first, stolen) == ([signal.SIGTERM], [])
