"""What comes while a call is under way goes with the next; nobody's cancellation loses another's item."""

from collections.abc import Sequence

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.gathered import Gathered


class Doubling:
    """Answers 2 x after a second, and notes the items of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        await anyio.sleep(1)
        if 13 in items:
            raise ValueError("13 was among them")
        return [2 * item for item in items]


async def ask(gathered: Gathered[int, int], item: int, answers: dict[int, int | str]) -> None:
    try:
        answers[item] = await gathered(item)
    except ValueError as error:
        answers[item] = str(error)


def test_items_that_come_during_a_call_go_together_in_the_next() -> None:
    async def main() -> None:
        call, answers = Doubling(), dict[int, int | str]()
        gathered = Gathered(call)
        async with anyio.create_task_group() as tasks:
            for item in range(5):
                tasks.start_soon(ask, gathered, item, answers)
                await anyio.sleep(0.1)
        assert call.calls == [[0], [1, 2, 3, 4]]
        assert answers == {item: 2 * item for item in range(5)}

    run_virtual(main)


def test_an_error_is_everyones_of_that_call_and_nobody_elses() -> None:
    async def main() -> None:
        call, answers = Doubling(), dict[int, int | str]()
        gathered = Gathered(call)
        async with anyio.create_task_group() as tasks:
            for item in (1, 13, 2):
                tasks.start_soon(ask, gathered, item, answers)
                await anyio.sleep(0.4)
        assert call.calls == [[1], [13, 2]]
        assert answers == {1: 2, 13: "13 was among them", 2: "13 was among them"}
        assert await gathered(4) == 8

    run_virtual(main)


def test_when_the_leading_caller_is_cancelled_the_others_are_answered_by_another_call() -> None:
    async def main() -> None:
        call, answers = Doubling(), dict[int, int | str]()
        gathered = Gathered(call)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, gathered, 0, answers)
            await anyio.sleep(0.1)
            leader = anyio.CancelScope()

            async def led() -> None:
                with leader:
                    await ask(gathered, 1, answers)

            tasks.start_soon(led)
            await anyio.sleep(0.1)
            tasks.start_soon(ask, gathered, 2, answers)
            await anyio.sleep(1)
            leader.cancel()
        assert call.calls == [[0], [1, 2], [2]]
        assert answers == {0: 0, 2: 4}

    run_virtual(main)


def test_an_item_whose_caller_left_while_waiting_is_in_no_call_and_settled_waits_for_the_one_under_way() -> None:
    async def main() -> None:
        call, answers = Doubling(), dict[int, int | str]()
        gathered = Gathered(call)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, gathered, 0, answers)
            await anyio.sleep(0.1)
            with anyio.move_on_after(0.1):
                await gathered(1)
            before = anyio.current_time()
            await gathered.settled()
            assert anyio.current_time() - before == pytest.approx(0.8)
            tasks.start_soon(ask, gathered, 2, answers)
        assert call.calls == [[0], [2]]

    run_virtual(main)
