"""The limits of groups stand still while the generator sleeps."""

import anyio

from asyncrl.collectors.patience import Patience
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock


def test_a_group_has_its_whole_time_awake() -> None:
    """One begins before the sleep, one within it, and one is given new time there."""

    async def main() -> list[tuple[str, float]]:
        patience, ended = Patience(), []

        async def wait(name: str, seconds: float, *, again_at: float | None = None) -> None:
            with patience.limit(seconds) as limit:
                if again_at is not None:
                    await anyio.sleep(again_at)
                    patience.renew(limit, seconds)
                await anyio.sleep_forever()
            ended.append((name, virtual_clock()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "before", 5.0)
            tasks.start_soon(lambda: wait("again", 5.0, again_at=3.0))
            await anyio.sleep(2.0)
            patience.stop()
            patience.stop()
            tasks.start_soon(wait, "within", 1.0)
            await anyio.sleep(10.0)
            patience.go_on()
            patience.go_on()
        return ended

    assert run_virtual(main) == [("within", 13.0), ("before", 15.0), ("again", 17.0)]


def test_a_limit_that_ended_is_forgotten() -> None:
    async def main() -> None:
        patience = Patience()
        with patience.limit(1.0) as limit:
            patience.stop()
        patience.go_on()
        assert limit.deadline == float("inf")
        assert not limit.cancelled_caught

    run_virtual(main)
