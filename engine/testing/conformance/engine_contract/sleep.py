"""Sleep: nothing is made, nothing is lost, and what comes afterwards is as it would have been without."""

from dataclasses import replace

import anyio
import anyio.lowlevel

from asyncrl.collectors.engines.base import Cache, Request, Result, SleepingEngine
from asyncrl.engine.testing.conformance.engine_contract.trial import Stream, Trial, check_near, reading

_CACHES: tuple[Cache, ...] = ("keep", "recompute")


async def tokens_are_those_without_a_sleep(trial: Trial) -> None:
    """Each sleep falls between two tokens; log-probabilities are equal to the bit where the cache is kept."""
    request = trial.long_request()
    alone = await trial.run(request)
    for cache in _CACHES:
        slept = await _with_sleeps(trial, replace(request, id=f"{request.id}-{cache}"), cache)
        assert slept.token_ids == alone.token_ids, cache
        assert slept.spans == alone.spans
        if cache == "keep":
            assert slept.logprobs == alone.logprobs
        check_near(slept.logprobs, alone.logprobs)


async def nothing_comes_in_sleep_and_what_is_asked_waits(trial: Trial) -> None:
    engine = _engine(trial)
    async with reading(trial, trial.long_request()) as (stream,), anyio.create_task_group() as tasks:
        await engine.sleep()
        asked = Stream(engine, trial.request(4))
        tasks.start_soon(asked.result)
        await anyio.sleep(trial.quiet_s)
        had = len(stream.token_ids)
        await anyio.sleep(trial.quiet_s)
        assert (len(stream.token_ids), stream.results, asked.token_ids) == (had, [], [])
        await engine.wake()
    assert (stream.results[0].finish, asked.results[0].finish) == ("length", "length")


async def an_update_in_sleep_serves_from_the_wake_on(trial: Trial) -> None:
    engine, old = _engine(trial), (await trial.engine.stats()).version
    for cache in _CACHES:
        async with reading(trial, trial.long_request()) as (stream,):
            await engine.sleep()
            new = await trial.update(cache=cache)
            assert (await engine.stats()).version == new
            await engine.wake()
        first, second = stream.results[0].spans
        assert (first[0], second) == (old, (new, first[2], trial.long_tokens)), cache
        old = new
    if trial.teacher is not None:
        request = trial.request(8)
        result = await trial.run(request)
        expected = trial.teacher(old, request.prompt_ids, result.token_ids, request.sampling)
        check_near(result.logprobs, expected, 1e-2)


async def an_update_that_fails_in_sleep_leaves_the_old_version(trial: Trial) -> None:
    engine, version = _engine(trial), (await trial.engine.stats()).version
    request = trial.request(8)
    alone = await trial.run(request)
    await engine.sleep()
    try:
        await engine.update_weights(version + 1, dict(list(trial.state(version + 1).items())[1:]))
        raise AssertionError("weights without a name were taken")
    except ValueError:
        await engine.wake()
    assert await trial.run(replace(request, id=f"{request.id}-again")) == alone


async def sleeps_pauses_and_aborts_go_together(trial: Trial) -> None:
    engine = _engine(trial)
    await engine.wake()
    async with reading(trial, trial.long_request(), trial.long_request()) as (first, second):
        await engine.sleep()
        await engine.sleep("recompute")
        await engine.pause()
        await engine.abort([first.request.id])
        await engine.wake()
        await anyio.sleep(trial.quiet_s)
        had = len(second.token_ids)
        await anyio.sleep(trial.quiet_s)
        assert len(second.token_ids) == had
        await engine.sleep()
        await engine.resume()
        await engine.wake()
        await engine.wake()
    assert [stream.results[0].finish for stream in (first, second)] == ["abort", "length"]


async def _with_sleeps(trial: Trial, request: Request, cache: Cache) -> Result:
    engine = _engine(trial)
    async with reading(trial, request) as (stream,):
        for _ in range(3):
            await engine.sleep(cache)
            await anyio.lowlevel.checkpoint()
            await engine.wake()
    return stream.results[0]


def _engine(trial: Trial) -> SleepingEngine:
    return trial.engine  # type: ignore[return-value]


SLEEP = (
    tokens_are_those_without_a_sleep,
    nothing_comes_in_sleep_and_what_is_asked_waits,
    an_update_in_sleep_serves_from_the_wake_on,
    an_update_that_fails_in_sleep_leaves_the_old_version,
    sleeps_pauses_and_aborts_go_together,
)
