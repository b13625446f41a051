"""Pauses and updates: nothing is made while paused, spans are exact, and what fails changes nothing."""

from collections.abc import Mapping
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from asyncrl.engine.errors import VersionError
from asyncrl.engine.testing.conformance.engine_contract.trial import Stream, Trial, check_result, reading


async def nothing_comes_while_paused(trial: Trial) -> None:
    async with reading(trial, trial.long_request()) as (stream,):
        await trial.engine.pause()
        # What had been made before may still be on its way to the reader.
        await anyio.sleep(trial.quiet_s)
        had = len(stream.token_ids)
        await anyio.sleep(trial.quiet_s)
        assert len(stream.token_ids) == had
        assert not stream.results
        await trial.engine.resume()
    assert stream.results[0].finish == "length"


async def what_is_asked_while_paused_is_made_afterwards(trial: Trial) -> None:
    await trial.engine.pause()
    stream = Stream(trial.engine, trial.request(4))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.result)
        await anyio.sleep(trial.quiet_s)
        assert not stream.token_ids
        await trial.engine.resume()
    assert stream.results[0].finish == "length"


async def a_pause_that_drains_lets_what_runs_end(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), trial.long_request()) as streams:
        await trial.engine.pause("drain")
        assert (await trial.engine.stats()).running == 0
        await trial.engine.resume()
    assert [stream.results[0].finish for stream in streams] == ["length", "length"]


async def a_pause_that_aborts_gives_what_was_made(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), trial.long_request()) as streams:
        await trial.engine.pause("abort")
        await trial.engine.resume()
    assert [stream.results[0].finish for stream in streams] == ["abort", "abort"]


async def an_abort_reaches_who_is_paused(trial: Trial) -> None:
    async with reading(trial, trial.long_request()) as (stream,):
        await trial.engine.pause()
        await trial.engine.abort()
        await trial.until(lambda stats: not stats.running)
        await anyio.sleep(trial.quiet_s)
        assert stream.results
        await trial.engine.resume()
    assert stream.results[0].finish == "abort"


async def pauses_and_resumes_may_come_twice(trial: Trial) -> None:
    await trial.engine.resume()
    async with reading(trial, trial.long_request()) as (stream,):
        await trial.engine.pause()
        await trial.engine.pause()
        await trial.engine.pause("abort")
        await trial.engine.resume()
        await trial.engine.resume()
    assert stream.results[0].finish == "abort"


async def an_update_marks_what_comes_behind_it(trial: Trial) -> None:
    old = (await trial.engine.stats()).version
    async with reading(trial, trial.long_request()) as (stream,):
        new = await trial.update()
        assert (await trial.engine.stats()).version == new
    result = stream.results[0]
    assert [version for version, _, _ in result.spans] == [old, new]
    assert result.spans[1][1] >= 1
    assert (await trial.run(trial.request(3))).spans == ((new, 0, 3),)


async def an_update_leaves_a_paused_engine_paused(trial: Trial) -> None:
    async with reading(trial, trial.long_request()) as (stream,):
        await trial.engine.pause()
        new = await trial.update()
        await anyio.sleep(trial.quiet_s)
        had = len(stream.token_ids)
        await anyio.sleep(trial.quiet_s)
        assert len(stream.token_ids) == had
        await trial.engine.resume()
    first, second = stream.results[0].spans
    assert second == (new, first[2], trial.long_tokens)


async def an_update_says_what_it_took(trial: Trial) -> None:
    version = (await trial.engine.stats()).version + 1
    update = await trial.engine.update_weights(version, trial.state(version))
    assert update.staged_bytes > 0
    assert update.stage_s >= 0
    assert update.pause_s >= 0


async def an_abort_beside_an_update_reaches_all(trial: Trial) -> None:
    """CASE-B20: whoever waits is told, no request stays behind, and the update goes on."""
    old = (await trial.engine.stats()).version
    async with reading(trial, *(trial.long_request() for _ in range(3))) as streams, anyio.create_task_group() as tasks:
        tasks.start_soon(trial.update)
        await checkpoint()
        await trial.engine.abort()
    assert [stream.results[0].finish for stream in streams] == ["abort"] * 3
    stats = await trial.engine.stats()
    assert (stats.running, stats.waiting, stats.version) == (0, 0, old + 1)


async def an_update_that_fails_leaves_the_old_version_serving(trial: Trial) -> None:
    version = (await trial.engine.stats()).version
    good = dict(trial.state(version + 1))
    name = next(iter(good))
    bad: list[Mapping[str, Any]] = [
        {key: value for key, value in good.items() if key != name},
        {**good, name: good[name][:1]},
        {**good, "nobody's": good[name]},
    ]
    async with reading(trial, trial.long_request()) as (stream,):
        for state in bad:
            await _refused(trial, version + 1, state)
        await _refused(trial, version - 1, trial.state(version - 1))
        assert (await trial.engine.stats()).version == version
    assert stream.results[0].spans == ((version, 0, trial.long_tokens),)
    if trial.teacher is not None:
        request = trial.request(8)
        result = await trial.run(request)
        expected = trial.teacher(version, request.prompt_ids, result.token_ids, request.sampling)
        assert max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)) < 1e-2


async def a_reset_loses_no_token(trial: Trial) -> None:
    version = (await trial.engine.stats()).version
    async with reading(trial, trial.long_request(group="reset"), trial.long_request(group="reset")) as streams:
        await trial.engine.reset_cache()
    for stream in streams:
        assert stream.results[0].spans == ((version, 0, trial.long_tokens),)
        check_result(stream.request, stream.results[0])


async def _refused(trial: Trial, version: int, state: Mapping[str, Any]) -> None:
    try:
        await trial.engine.update_weights(version, state)
    except VersionError:
        return
    raise AssertionError(f"version {version} was taken")


CONTROL = (
    nothing_comes_while_paused,
    what_is_asked_while_paused_is_made_afterwards,
    a_pause_that_drains_lets_what_runs_end,
    a_pause_that_aborts_gives_what_was_made,
    an_abort_reaches_who_is_paused,
    pauses_and_resumes_may_come_twice,
    an_update_marks_what_comes_behind_it,
    an_update_leaves_a_paused_engine_paused,
    an_update_says_what_it_took,
    an_abort_beside_an_update_reaches_all,
    an_update_that_fails_leaves_the_old_version_serving,
    a_reset_loses_no_token,
)
