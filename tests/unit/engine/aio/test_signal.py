"""The one primitive for waiting: condition, deadline, error."""

import anyio
import pytest

from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.aio.virtual_time import Stalled, run_virtual, virtual_clock
from asyncrl.engine.errors import Overdue


def test_all_waiters_wake_when_their_own_condition_holds() -> None:
    async def main() -> None:
        signal, state, woke = Signal(), {"n": 0}, dict[int, float]()

        async def wait(until: int) -> None:
            await signal.wait_for(lambda: state["n"] >= until, timeout_s=100, what=lambda: "n")
            woke[until] = virtual_clock()

        async with anyio.create_task_group() as tasks:
            for until in (1, 2, 2, 3):
                tasks.start_soon(wait, until)
            for _ in range(3):
                await anyio.sleep(1)
                state["n"] += 1
                signal.notify()
        assert woke == {1: 1.0, 2: 2.0, 3: 3.0}

    run_virtual(main)


def test_a_condition_that_holds_already_needs_no_notice() -> None:
    async def main() -> None:
        await Signal().wait_for(lambda: True, timeout_s=1, what=lambda: "nothing")
        assert await Signal().wait_at_most(lambda: True, 0.0)
        assert virtual_clock() == 0.0

    run_virtual(main)


def test_a_wait_that_is_too_long_says_for_what_and_how_long() -> None:
    async def main() -> None:
        with pytest.raises(Overdue, match=r"a batch: nothing for 2\.5 s"):
            await Signal().wait_for(lambda: False, timeout_s=2.5, what=lambda: "a batch")
        assert virtual_clock() == 2.5

    run_virtual(main)


def test_the_text_of_a_time_out_tells_of_its_own_moment() -> None:
    async def main() -> None:
        state = {"n": 0}
        async with anyio.create_task_group() as tasks:

            async def change() -> None:
                await anyio.sleep(1)
                state["n"] = 7

            tasks.start_soon(change)
            with pytest.raises(Overdue, match="n is 7"):
                await Signal().wait_for(lambda: False, timeout_s=2, what=lambda: f"n is {state['n']}")

    run_virtual(main)


def test_a_wait_without_a_deadline_ends_with_its_condition_and_is_counted_while_it_lasts() -> None:
    async def main() -> None:
        signal, held = Signal(), list[float]()
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                await signal.wait_until(lambda: bool(held))
                assert virtual_clock() == 1e4

            tasks.start_soon(wait)
            await anyio.sleep(1e4)
            assert signal.statistics().tasks_waiting == 1
            held.append(1.0)
            signal.notify()
        assert signal.statistics().tasks_waiting == 0

    run_virtual(main)


def test_wait_at_most_says_whether_the_condition_came_to_hold() -> None:
    async def main() -> None:
        signal = Signal()
        assert not await signal.wait_at_most(lambda: False, 3.0)
        assert virtual_clock() == 3.0

    run_virtual(main)


def test_a_notice_without_the_condition_does_not_end_the_wait() -> None:
    async def main() -> None:
        signal = Signal()
        async with anyio.create_task_group() as tasks:

            async def noise() -> None:
                for _ in range(3):
                    await anyio.sleep(1)
                    signal.notify()

            tasks.start_soon(noise)
            assert not await signal.wait_at_most(lambda: False, 10.0)
        assert virtual_clock() == 10.0

    run_virtual(main)


def test_virtual_time_tells_a_stall_at_once() -> None:
    with pytest.raises(Stalled, match="no timer and nothing ready"):
        run_virtual(anyio.sleep_forever)
