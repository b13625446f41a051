"""Time that passes only while its owner is awake."""

import anyio

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.aio.waking import Waking


def test_seconds_stand_still_in_sleep() -> None:
    async def main() -> tuple[list[float], float]:
        waking, ended = Waking(), list[float]()

        async def last(seconds: float) -> None:
            await waking.last(seconds)
            ended.append(virtual_clock())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(last, 5.0)
            await anyio.sleep(2.0)
            waking.sleep()
            tasks.start_soon(last, 1.0)
            await anyio.sleep(8.0)
            waking.wake()
            waking.wake()
        return ended, waking.seconds

    assert run_virtual(main) == ([11.0, 13.0], 5.0)
