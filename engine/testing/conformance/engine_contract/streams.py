"""Streams: chunks and then one result; what ends them; partial results and how they go on."""

from contextlib import aclosing
from dataclasses import replace

import anyio

from asyncrl.collectors.engines.base import Chunk, Request, Sampling
from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.engine.testing.conformance.engine_contract.trial import Stream, Trial, reading


async def a_stream_ends_with_one_result_that_holds_its_chunks(trial: Trial) -> None:
    result = await trial.run(trial.request(8))
    assert (result.finish, len(result.token_ids)) == ("length", 8)
    version = (await trial.engine.stats()).version
    assert result.spans == ((version, 0, 8),)


async def many_requests_end_each_with_its_own_tokens(trial: Trial) -> None:
    requests = [trial.request(2 + n % 7, group=f"g{n % 3}" if n % 2 else "") for n in range(24)]
    async with reading(trial, *requests, tokens=0) as streams:
        pass
    assert [len(stream.token_ids) for stream in streams] == [2 + n % 7 for n in range(24)]
    stats = await trial.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def without_a_stream_only_the_result_comes(trial: Trial) -> None:
    stream = Stream(trial.engine, replace(trial.request(8), stream=False))
    result = await stream.result()
    assert (stream.token_ids, len(result.token_ids)) == ([], 8)


async def a_stop_id_is_the_last_token(trial: Trial) -> None:
    stops = tuple(range(0, trial.vocabulary, 2))[-16:]
    for _ in range(4):
        result = await trial.run(trial.request(trial.long_tokens, stop_ids=stops))
        assert result.finish == ("stop" if result.token_ids[-1] in stops else "length")


async def the_token_that_completes_a_stop_string_is_the_last(trial: Trial) -> None:
    if trial.text is None:
        return
    stops = tuple(trial.text([token]) for token in range(2, trial.vocabulary, 3))
    for _ in range(4):
        result = await trial.run(trial.request(trial.long_tokens, stop_strings=stops))
        before, whole = (trial.text(result.token_ids[:end]) for end in (-1, None))
        assert not any(stop in before for stop in stops)
        assert result.finish == ("stop" if any(stop in whole for stop in stops) else "length")


async def an_abort_gives_what_was_made(trial: Trial) -> None:
    kept = trial.long_request()
    async with reading(trial, trial.long_request(), kept) as (aborted, other):
        await trial.engine.abort([aborted.request.id, "unknown"])
    result = aborted.results[0]
    assert result.finish == "abort"
    assert 1 <= len(result.token_ids) < trial.long_tokens
    assert other.results[0].finish == "length"
    await trial.engine.abort([aborted.request.id])


async def an_abort_of_all_spares_nobody(trial: Trial) -> None:
    async with reading(trial, *(trial.long_request() for _ in range(3))) as streams:
        await trial.engine.abort()
    assert [stream.results[0].finish for stream in streams] == ["abort"] * 3
    assert (await trial.run(trial.request(4))).finish == "length"


async def who_stops_reading_aborts(trial: Trial) -> None:
    async with aclosing(trial.engine.generate(trial.long_request())) as items:
        async for _ in items:
            break
    await trial.until(lambda stats: not stats.running)


async def a_group_whose_reader_is_cancelled_is_aborted(trial: Trial) -> None:
    """As one is that no batch to come could train (`rollout.cancel_stale`), those that wait included."""
    many, before = 40, (await trial.engine.stats()).tokens
    generator = EngineGenerator(trial.engine, Sampling(trial.long_tokens))
    prompt = trial.request().prompt_ids
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generator.generate, GroupRequest(prompt, tuple(range(many)), trial.long_tokens, 1.0))
        await trial.until(lambda stats: stats.running > 0 and stats.running + stats.waiting == many)
        tasks.cancel_scope.cancel()
    await trial.until(lambda stats: not stats.running and not stats.waiting)
    # Otherwise all of them would have been decoded to their ends.
    assert (await trial.engine.stats()).tokens - before < many * trial.long_tokens / 2


async def a_partial_goes_on_where_it_was(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), tokens=2) as (stream,):
        await trial.engine.abort([stream.request.id])
    partial = stream.results[0]
    version = await trial.update()
    result = await trial.run(replace(stream.request, id="continued", done=partial))
    assert (result.finish, len(result.token_ids)) == ("length", trial.long_tokens)
    assert result.spans == (*partial.spans, (version, len(partial.token_ids), trial.long_tokens))


async def a_partial_without_budget_comes_back_as_it_is(trial: Trial) -> None:
    async with reading(trial, trial.long_request(), tokens=2) as (stream,):
        await trial.engine.abort([stream.request.id])
    partial = stream.results[0]
    short = replace(stream.request, id="spent", sampling=Sampling(len(partial.token_ids)), done=partial)
    assert await trial.run(short) == replace(partial, finish="length")


async def what_cannot_be_served_ends_as_an_error(trial: Trial) -> None:
    good = trial.request(8)
    bad = [
        Request("no prompt", (), Sampling(4), 0),
        Request("too long", good.prompt_ids, Sampling(10_000_000), 0),
    ]
    for request in bad:
        items = [item async for item in trial.engine.generate(request)]
        assert len(items) == 1
        assert not isinstance(items[0], Chunk)
        assert (items[0].finish, items[0].token_ids) == ("error", ())
    assert (await trial.run(good)).finish == "length"


STREAMS = (
    a_stream_ends_with_one_result_that_holds_its_chunks,
    many_requests_end_each_with_its_own_tokens,
    without_a_stream_only_the_result_comes,
    a_stop_id_is_the_last_token,
    the_token_that_completes_a_stop_string_is_the_last,
    an_abort_gives_what_was_made,
    an_abort_of_all_spares_nobody,
    who_stops_reading_aborts,
    a_group_whose_reader_is_cancelled_is_aborted,
    a_partial_goes_on_where_it_was,
    a_partial_without_budget_comes_back_as_it_is,
    what_cannot_be_served_ends_as_an_error,
)
