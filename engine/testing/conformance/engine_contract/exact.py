"""Batches repeat to the bit, whatever else the engine is asked, and never span versions."""

import anyio

from asyncrl.collectors.engines.base import GroupEngine, Result
from asyncrl.engine.testing.conformance.engine_contract.trial import Trial, check_result, reading


async def a_batch_repeats_to_the_bit_beside_other_requests(trial: Trial) -> None:
    engine: GroupEngine = trial.engine  # type: ignore[assignment]
    requests = [trial.request(3 + n % 9, group=f"g{n // 4}", stop_ids=(3, 5)) for n in range(12)]
    alone = await engine.generate_batch(requests)
    for request, result in zip(requests, alone, strict=True):
        check_result(request, result)
    async with reading(trial, *(trial.long_request() for _ in range(3))):
        beside = await engine.generate_batch(requests)
    assert beside == alone


async def a_batch_has_no_update_within_it(trial: Trial) -> None:
    engine: GroupEngine = trial.engine  # type: ignore[assignment]
    old = (await engine.stats()).version
    requests = [trial.long_request() for _ in range(4)]
    async with anyio.create_task_group() as tasks:

        async def update_once_it_runs() -> None:
            await trial.until(lambda stats: bool(stats.running))
            await trial.update()

        tasks.start_soon(update_once_it_runs)
        results = await engine.generate_batch(requests)
    assert [result.spans for result in results] == [((old, 0, trial.long_tokens),)] * 4
    assert (await engine.stats()).version == old + 1


async def an_update_waits_for_a_batch_that_is_paused(trial: Trial) -> None:
    engine: GroupEngine = trial.engine  # type: ignore[assignment]
    old = (await engine.stats()).version
    results: list[Result] = []

    async def decode() -> None:
        results.extend(await engine.generate_batch([trial.long_request() for _ in range(3)]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(decode)
        await trial.until(lambda stats: bool(stats.running))
        await engine.pause()
        tasks.start_soon(trial.update)
        await anyio.sleep(trial.quiet_s)
        assert (await engine.stats()).version == old
        await engine.resume()
    assert [result.spans for result in results] == [((old, 0, trial.long_tokens),)] * 3
    assert (await engine.stats()).version == old + 1


async def a_batch_names_the_member_that_cannot_be_served(trial: Trial) -> None:
    engine: GroupEngine = trial.engine  # type: ignore[assignment]
    results = await engine.generate_batch([trial.request(4), trial.request(10_000_000), trial.request(4)])
    assert [result.finish for result in results] == ["length", "error", "length"]
    assert await engine.generate_batch([]) == []


async def a_batch_ends_before_a_sleep(trial: Trial) -> None:
    engine: GroupEngine = trial.engine  # type: ignore[assignment]
    requests = [trial.long_request() for _ in range(3)]
    alone = await engine.generate_batch(requests)
    results: list[Result] = []

    async def decode() -> None:
        results.extend(await engine.generate_batch(requests))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(decode)
        await trial.until(lambda stats: bool(stats.running))
        await engine.sleep("recompute")
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        await engine.wake()
    assert results == alone


EXACT = (
    a_batch_repeats_to_the_bit_beside_other_requests,
    a_batch_has_no_update_within_it,
    an_update_waits_for_a_batch_that_is_paused,
    a_batch_names_the_member_that_cannot_be_served,
    a_batch_ends_before_a_sleep,
)
