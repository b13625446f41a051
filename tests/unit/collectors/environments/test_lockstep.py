"""Turns in step: one batch per turn of all samples that go on, whoever has ended, failed or been given up."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.environments.builtin.guess import Guess
from asyncrl.collectors.environments.lockstep import Batch, Lockstep
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.records import Grant, Prompt


def request(name: str) -> Request:
    return Request(name, (1,), Sampling(4), seed=0)


def played(body: Callable[[Lockstep, list[list[str]]], Awaitable[None]], *, samples: int) -> list[list[str]]:
    """Run `body`; each batch is answered at once. Return which requests decoded together, in order."""

    async def main() -> list[list[str]]:
        batches: list[list[str]] = []

        def send(batch: Batch) -> None:
            batches.append([batch.requests[place].id for place in batch.places])
            batch.results = {place: Result((5,), (-1.0,), ((0, 0, 1),), "stop") for place in batch.places}
            batch.done.set()

        with anyio.fail_after(100.0):
            await body(Lockstep(samples, send), batches)
        return batches

    return run_virtual(main)


def test_a_turn_waits_for_all_that_go_on_and_for_nobody_else() -> None:
    """Sample 0 has one turn, 1 has two and 2 three, each after a pause of another length."""

    async def body(lockstep: Lockstep, batches: list[list[str]]) -> None:
        async def sample(i: int) -> None:
            for turn in range(i + 1):
                await anyio.sleep((3 - i) * 0.7)
                await lockstep.turn((0, i), request(f"{i}/{turn}"))
            lockstep.leave()

        async with anyio.create_task_group() as tasks:
            for i in range(3):
                tasks.start_soon(sample, i)
        assert lockstep.over

    assert played(body, samples=3) == [["0/0", "1/0", "2/0"], ["1/1", "2/1"], ["2/2"]]


def test_a_sample_that_is_given_up_while_it_asks_holds_nobody() -> None:
    async def body(lockstep: Lockstep, batches: list[list[str]]) -> None:
        async def given_up() -> None:
            with anyio.move_on_after(1.0):
                await lockstep.turn((0, 0), request("gone"))
            lockstep.leave()

        async def other() -> None:
            await anyio.sleep(5.0)
            await lockstep.turn((0, 1), request("stays"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(given_up)
            tasks.start_soon(other)

    assert played(body, samples=2) == [["stays"]]


def test_a_batch_that_failed_fails_all_its_turns() -> None:
    async def main() -> None:
        def send(batch: Batch) -> None:
            batch.error = GenerationError("no device")
            batch.done.set()

        lockstep = Lockstep(1, send)
        with pytest.raises(GenerationError, match="no device"):
            await lockstep.turn((0, 0), request("a"))

    run_virtual(main)


def test_groups_that_were_granted_together_go_in_step_and_a_failed_sample_leaves(table: Any) -> None:
    """Two groups of two samples on an engine that takes groups: what decodes together, in order."""

    class Moody(Guess):
        async def reset(self, prompt: Any, seed: int) -> int:
            if prompt.id == 1:
                raise RuntimeError("no world")
            return await super().reset(prompt, seed)

    batches: list[int] = []

    async def work(at: Any) -> None:
        grants = [Grant(i, Prompt(i, "9>", "3", "guess"), 2, 3) for i in range(3)]
        await at.collector.grant(grants)
        messages: list[Any] = []
        while len(messages) < 3:
            messages += [message for _, message in await at.collector.events(len(messages), 1e6)]
        reasons = [getattr(message, "reason", "put") for message in messages]
        assert sorted(reasons) == ["environment_error", "put", "put"]

    def say(asked: Request) -> list[int]:
        return [2 + (5 if len(asked.prompt_ids) == 2 else 3), 1]

    table(Moody(), say, work, size=2, batches=batches)
    assert batches == [4, 4]


def test_a_group_that_is_given_up_in_its_environment_holds_none_of_its_peers(table: Any) -> None:
    class Hangs(Guess):
        async def reset(self, prompt: Any, seed: int) -> int:
            if prompt.id == 1:
                await anyio.sleep(20.0)
            return await super().reset(prompt, seed)

    async def work(at: Any) -> None:
        await at.collector.grant([Grant(i, Prompt(i, "9>", "5", "guess"), 2, 3) for i in range(2)])
        await anyio.sleep(1.0)
        await at.collector.cancel([1])
        with anyio.fail_after(10.0):
            messages: list[Any] = []
            while len(messages) < 2:
                messages += [message for _, message in await at.collector.events(len(messages), 5.0)]
        assert {getattr(message, "reason", "put") for message in messages} == {"cancelled_stale", "put"}

    batches: list[int] = []
    table(Hangs(), lambda _: [7, 1], work, size=2, batches=batches)
    assert batches == [2]
