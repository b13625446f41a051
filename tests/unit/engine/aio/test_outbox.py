"""The long poll: in order, nothing missed, nothing twice, an error at the end."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.outbox import Outbox, OutboxStatistics
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.records.message import Served


def test_a_reader_that_asks_after_the_last_number_sees_each_message_once_and_in_order() -> None:
    async def main() -> None:
        box = Outbox()
        for version in range(3):
            box.post(Served(version))
        first = await box.after(0, 1.0)
        assert first == [(1, Served(0)), (2, Served(1)), (3, Served(2))]
        box.post(Served(3))
        assert await box.after(3, 1.0) == [(4, Served(3))]

    run_virtual(main)


def test_a_lost_answer_is_given_again() -> None:
    async def main() -> None:
        box = Outbox()
        box.post(Served(0))
        box.post(Served(1))
        assert await box.after(0, 1.0) == await box.after(0, 1.0)
        assert await box.after(1, 1.0) == [(2, Served(1))]

    run_virtual(main)


def test_an_empty_poll_ends_with_its_deadline() -> None:
    async def main() -> None:
        assert await Outbox().after(0, 20.0) == []
        assert virtual_clock() == 20.0

    run_virtual(main)


def test_a_message_ends_the_wait_at_once() -> None:
    async def main() -> None:
        box = Outbox()

        async def later() -> None:
            await anyio.sleep(3)
            box.post(Served(1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            assert await box.after(0, 1000.0) == [(1, Served(1))]
        assert virtual_clock() == 3.0

    run_virtual(main)


def raises(poll: Callable[[], Awaitable[Any]]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def checked() -> None:
        with pytest.raises(ZeroDivisionError):
            await poll()

    return checked


def test_the_actors_error_comes_after_its_messages_and_then_at_every_poll() -> None:
    """CASE-B1: the failure channel."""

    async def main() -> None:
        box = Outbox()
        box.post(Served(1))
        box.fail(ZeroDivisionError())
        assert await box.after(0, 1.0) == [(1, Served(1))]
        for _ in range(2):
            await raises(lambda: box.after(1, 1.0))()

    run_virtual(main)


def test_an_error_wakes_a_waiting_poll() -> None:
    async def main() -> None:
        box = Outbox()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(raises(lambda: box.after(0, 1e6)))
            await anyio.sleep(1)
            box.fail(ZeroDivisionError())
        assert virtual_clock() == 1.0

    run_virtual(main)


def test_an_outbox_says_what_waits_in_it() -> None:
    async def main() -> None:
        box = Outbox()
        box.post(Served(0))
        box.post(Served(1))
        assert box.statistics() == OutboxStatistics(unread=2, tasks_waiting=0)
        assert await box.after(1, 1.0) == [(2, Served(1))]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.after, 2, 10.0)
            await anyio.sleep(1)
            assert box.statistics() == OutboxStatistics(unread=0, tasks_waiting=1)

    run_virtual(main)
