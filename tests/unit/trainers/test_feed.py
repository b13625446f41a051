"""Reading ahead: one read in flight, each group once, errors as themselves, nothing left behind."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import MissingRows
from asyncrl.engine.records import MicroBatch
from asyncrl.trainers.feed import feed


class SlowFetch:
    """Takes 1 s a read and says when reads began and ended; the value of a column is its name and the key."""

    def __init__(self, fail: Callable[[Sequence[str]], None] = lambda keys: None) -> None:
        self.fail = fail
        self.began: list[tuple[float, tuple[str, ...]]] = []
        self.running = 0
        self.most = 0

    async def read(self, keys: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
        self.began.append((anyio.current_time(), tuple(keys)))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await anyio.sleep(1)
            self.fail(keys)
            return {name: [f"{name}/{key}" for key in keys] for name in columns}
        finally:
            self.running -= 1


def batches(*keys: str) -> list[MicroBatch]:
    return [MicroBatch(tuple(f"v0_{key}" for key in text.split()), 1) for text in keys]


async def compute(fetch: SlowFetch, plan: list[MicroBatch], seconds: float, *, fail: bool = False) -> None:
    async with feed(fetch, plan, columns=["tokens"]) as fed:
        for _ in plan:
            await fed.receive()
            await anyio.sleep(seconds)
            if fail:
                raise FloatingPointError("nan")


def test_the_next_read_runs_while_a_micro_batch_is_computed() -> None:
    """Three reads of 1 s beside three computations of 2 s: 7 s in all, and no read is more than one ahead."""
    fetch = SlowFetch()
    plan = batches("p0_g0", "p1_g0", "p2_g0")

    async def main() -> float:
        async with feed(fetch, plan, columns=["tokens"]) as fed:
            for batch in plan:
                assert await fed.receive() == {"tokens": [f"tokens/{batch.keys[0]}"]}
                await anyio.sleep(2)
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(7.0)
    assert [start for start, _ in fetch.began] == pytest.approx([0.0, 1.0, 3.0])
    assert fetch.most == 1


def test_a_group_is_read_once_with_all_keys_that_will_be_needed() -> None:
    """Samples of one group in several micro-batches, a filler, and a key twice in a micro-batch."""
    fetch = SlowFetch()
    plan = batches("p0_g0 p1_g0", "p0_g1", "p0_g0 p2_g1 p2_g1", "p1_g0")

    async def main() -> list[Any]:
        async with feed(fetch, plan, columns=["a", "b"]) as fed:
            return [await fed.receive() for _ in plan]

    found = run_virtual(main)
    assert [keys for _, keys in fetch.began] == [("v0_p0_g0", "v0_p0_g1", "v0_p1_g0"), ("v0_p2_g1",)]
    for batch, values in zip(plan, found, strict=True):
        assert values == {name: [f"{name}/{key}" for key in batch.keys] for name in "ab"}


@pytest.mark.parametrize("computing_s", [0.0, 0.5, 5.0])
def test_an_error_of_a_read_surfaces_as_itself(computing_s: float) -> None:
    """Also while the micro-batch before it is computed: that is cut short."""

    def fail(keys: Sequence[str]) -> None:
        if "v0_p1_g0" in keys:
            raise MissingRows("v0_p1_g0 is gone")

    fetch = SlowFetch(fail)
    plan = batches("p0_g0", "p1_g0", "p2_g0")

    async def main() -> float:
        with pytest.raises(MissingRows, match="v0_p1_g0 is gone"):
            await compute(fetch, plan, computing_s)
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(2.0)
    assert len(fetch.began) == 2
    assert fetch.running == 0


def test_an_error_of_the_computation_ends_the_read_ahead() -> None:
    fetch = SlowFetch()

    async def main() -> None:
        with pytest.raises(FloatingPointError, match="nan"):
            await compute(fetch, batches("p0_g0", "p1_g0"), 0.5, fail=True)
        assert anyio.current_time() == pytest.approx(1.5)

    run_virtual(main)
    assert (len(fetch.began), fetch.running) == (2, 0)


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5])
def test_cancelling_leaves_no_read_behind(after_s: float) -> None:
    """In the first read, in a computation beside a read, and beside rows that wait."""
    fetch = SlowFetch()

    async def main() -> None:
        with anyio.move_on_after(after_s):
            async with feed(fetch, batches("p0_g0", "p1_g0", "p2_g0"), columns=["tokens"]) as fed:
                await fed.receive()
                await anyio.sleep(10)
        assert anyio.current_time() == pytest.approx(after_s)
        await anyio.sleep(5)

    run_virtual(main)
    assert fetch.running == 0
    assert len(fetch.began) == (1 if after_s < 1 else 2)


def test_a_rank_without_micro_batches_reads_nothing() -> None:
    fetch = SlowFetch()

    async def main() -> None:
        async with feed(fetch, [], columns=["tokens"]):
            pass

    run_virtual(main)
    assert fetch.began == []
