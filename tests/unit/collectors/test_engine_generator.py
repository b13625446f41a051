"""A generator over an engine: groups whole and in order, updates while they decode, and exact batches."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling
from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator, OnUpdate
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.testing.conformance.engine_trials import native_engine, tiny_model
from asyncrl.engine.testing.scripted_engine import ScriptedEngine

STATE = {"w": torch.zeros(2)}
Body = Callable[[EngineGenerator], Awaitable[None]]


def request(seeds: tuple[int, ...] = (1, 2, 3), tokens: int = 10, **more: Any) -> GroupRequest:
    return GroupRequest((1, 2), seeds, tokens, 1.0, **more)


def scripted(body: Body, *, on_update: OnUpdate = "keep", rows: int = 8) -> None:
    """Run `body` in virtual time on an engine that makes a token per second, each of which is its version."""

    async def main() -> None:
        engine = ScriptedEngine(STATE, token_s=1.0, rows=rows)
        generator = EngineGenerator(engine, Sampling(10), on_update=on_update)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            await body(generator)
            tasks.cancel_scope.cancel()

    run_virtual(main)


async def updated(generator: EngineGenerator, after_s: float, version: int = 1) -> None:
    await anyio.sleep(after_s)
    await generator.update_weights(version, STATE)


def test_a_response_goes_on_under_new_weights_and_says_which_made_what() -> None:
    async def body(generator: EngineGenerator) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(updated, generator, 4.5)
            completions = await generator.generate(request())
        assert virtual_clock() == pytest.approx(10.0, abs=1.0)
        for completion in completions:
            first, second = completion.spans
            assert (first[0], second[0], second[2]) == (0, 1, 10)
            assert completion.token_ids == (0,) * first[2] + (1,) * (10 - second[1])
            assert 4 <= first[2] <= 5

    scripted(body)


@pytest.mark.parametrize(("on_update", "spans"), [("continue", 2), ("restart", 1)])
def test_a_response_that_an_update_aborts_goes_on_or_begins_anew(on_update: OnUpdate, spans: int) -> None:
    async def body(generator: EngineGenerator) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(updated, generator, 4.5)
            completions = await generator.generate(request())
        for completion in completions:
            assert len(completion.token_ids) == 10
            assert len(completion.spans) == spans
            assert completion.spans[-1][0] == 1

    scripted(body, on_update=on_update)


def test_a_group_begins_to_decode_when_a_slot_is_free_and_not_before() -> None:
    async def body(generator: EngineGenerator) -> None:
        turns: dict[str, float] = {}

        async def group(name: str) -> None:
            await generator.generate(request(turn=lambda _: turns.setdefault(name, virtual_clock())))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group, "first")
            tasks.start_soon(group, "second")
        assert turns["first"] <= 1.0
        assert turns["second"] >= 10.0

    scripted(body, rows=3)


def test_a_request_that_the_engine_cannot_serve_fails_alone() -> None:
    async def body(generator: EngineGenerator) -> None:
        with pytest.raises(GenerationError, match="decoding it failed"):
            await generator.generate(GroupRequest((), (1,), 10, 1.0))
        assert len(await generator.generate(request())) == 3

    scripted(body)


@pytest.mark.parametrize("on_update", ["keep", "continue"])
def test_the_first_of_a_group_to_end_are_kept_in_order_and_the_others_aborted(on_update: OnUpdate) -> None:
    """Lengths by seed: 9, 3, 8, 2 and 5 tokens; of five samples three are asked for."""
    lengths = {1: 9, 2: 3, 3: 8, 4: 2, 5: 5}

    def make(request: Request, index: int, version: int) -> int:
        return 1 if index + 1 == lengths[request.seed] else 7

    async def main() -> None:
        engine = ScriptedEngine(STATE, token_s=1.0, make=make)
        generator = EngineGenerator(engine, Sampling(10, stop_ids=(1,)), on_update=on_update)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            tasks.start_soon(updated, generator, 3.5)
            completions = await generator.generate(request((1, 2, 3, 4, 5), surplus=2))
            assert virtual_clock() == pytest.approx(5.0, abs=1.0)
            assert [len(completion.token_ids) for completion in completions] == [3, 2, 5]
            await anyio.sleep(1.5)
            assert (engine._running, list(engine._waiting)) == ([], [])
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_a_sample_of_the_surplus_may_go_wrong_and_more_may_not() -> None:
    async def ended(wrong: tuple[int, ...]) -> None:
        class Failing(ScriptedEngine):
            async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
                if request.seed in wrong:
                    yield Result((), (), (), "error", "out of order")
                async for item in super().generate(request):
                    yield item

        generator = EngineGenerator(Failing(STATE, token_s=1.0), Sampling(10))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            if len(wrong) > 1:
                with pytest.raises(GenerationError, match="out of order"):
                    await generator.generate(request((1, 2, 3, 4), surplus=1))
            else:
                assert len(await generator.generate(request((1, 2, 3, 4), surplus=1))) == 3
            tasks.cancel_scope.cancel()

    run_virtual(lambda: ended((2,)))
    run_virtual(lambda: ended((2, 3)))


def test_groups_granted_together_decode_as_one_batch_to_the_bit() -> None:
    """Whatever is asked meanwhile, and however the requests of the other batch fall between."""

    async def run(order: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        engine = native_engine(tiny_model("llama", 0), rows=8, length=32)
        generator = EngineGenerator(engine, Sampling(8), groups=engine, exact=True)
        found: dict[tuple[int, int], Any] = {}

        async def group(batch: int, place: int) -> None:
            seeds = (10 * batch + place, 100 + place)
            made = await generator.generate(GroupRequest((1, 2 + place, 3), seeds, 8, 1.0, batch=batch, peers=2))
            found[batch, place] = [(one.token_ids, one.logprobs) for one in made]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            async with anyio.create_task_group() as groups:
                for batch, place in order:
                    groups.start_soon(group, batch, place)
            tasks.cancel_scope.cancel()
        return found

    first = run_virtual(lambda: run([(0, 0), (0, 1), (1, 0), (1, 1)]))
    second = run_virtual(lambda: run([(1, 0), (0, 0), (1, 1), (0, 1)]))
    assert len(first) == 4
    assert first == second


def test_a_group_taken_whole_has_the_tokens_of_its_seeds_and_says_when_it_begins() -> None:
    async def run(whole: bool) -> tuple[list[Any], int]:
        engine = native_engine(tiny_model("llama", 0), rows=4, length=32)
        generator = EngineGenerator(engine, Sampling(8), groups=engine if whole else None)
        turns: list[bool] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            made = await generator.generate(GroupRequest((1, 2, 3), tuple(range(6)), 8, 1.0, turn=turns.append))
            tasks.cancel_scope.cancel()
        return [one.token_ids for one in made], len(turns)

    whole, streamed = run_virtual(lambda: run(True)), run_virtual(lambda: run(False))
    assert whole == streamed
    assert whole[1] == 1


def test_a_group_taken_whole_that_is_cancelled_is_aborted_with_what_waits() -> None:
    async def main() -> None:
        engine = native_engine(tiny_model("llama", 0), rows=4, length=64)
        generator = EngineGenerator(engine, Sampling(50), groups=engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            with anyio.CancelScope() as scope:
                await generator.generate(request(tuple(range(12)), 50, turn=lambda _: scope.cancel()))
            await generator.generate(request((20,), 2))
            stats = await engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.tokens < 50
            tasks.cancel_scope.cancel()

    run_virtual(main)
