"""What the contract of engines is tried on, and how its tests ask."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio

from asyncrl.collectors.engines.base import Cache, Chunk, Engine, EngineStats, Request, Result, Sampling, Spans

Teacher = Callable[[int, Sequence[int], Sequence[int], Sampling], Sequence[float]]
"""(version, prompt, tokens, sampling) → the tokens' log-probabilities in one pass over the whole sequence."""
_SOON_S = 60.0


@dataclass(slots=True)
class Trial:
    """An engine that runs, and that tests may share: each leaves it idle and resumed, at whatever version.

    `states` are the weights of versions, by turns: version v has those of `state(v)`. Prompts are of tokens below
    `vocabulary`. A response of `long_tokens` takes long enough to be caught while it is made, and fits. What has not
    come `quiet_s` after a pause does not come.
    """

    engine: Engine
    states: Sequence[Mapping[str, Any]]
    vocabulary: int
    long_tokens: int
    teacher: Teacher | None = None
    text: Callable[[Sequence[int]], str] | None = None
    quiet_s: float = 0.05
    _numbers: Any = field(default_factory=count)

    def state(self, version: int) -> Mapping[str, Any]:
        """Return the weights of a version."""
        return self.states[version % len(self.states)]

    def request(self, tokens: int = 8, *, group: str = "", done: Result | None = None, **sampling: Any) -> Request:
        """Return a request with an id, a prompt and a seed of its own, or its group's prompt."""
        number = next(self._numbers)
        salt = sum(map(ord, group)) if group else number
        prompt = tuple(2 + (salt * 7 + i * 5) % (self.vocabulary - 2) for i in range(3 + salt % 4))
        return Request(f"r{number}", prompt, Sampling(tokens, **sampling), seed=number, group=group, done=done)

    def long_request(self, **more: Any) -> Request:
        return self.request(self.long_tokens, **more)

    async def run(self, request: Request) -> Result:
        """Return a request's result, and check what any engine must keep to."""
        result = await Stream(self.engine, request).result()
        check_result(request, result)
        return result

    async def until(self, condition: Callable[[EngineStats], bool]) -> None:
        """Return once an engine's statistics are so; they tell only who asks."""
        with anyio.fail_after(_SOON_S):
            while not condition(await self.engine.stats()):  # noqa: ASYNC110
                await anyio.sleep(0.001)

    async def update(self, *, cache: Cache = "keep") -> int:
        """Bring the next version's weights in; return its number."""
        version = (await self.engine.stats()).version + 1
        await self.engine.update_weights(version, self.state(version), cache)
        return version


class Stream:
    """Reads a request's stream, and keeps what has come."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.results: list[Result] = []
        self._engine = engine
        self._came = anyio.Event()

    async def result(self) -> Result:
        """Read to the end; return the one result."""
        with anyio.fail_after(_SOON_S):
            await self.read()
        assert len(self.results) == 1
        return self.results[0]

    async def read(self) -> None:
        done = self.request.done
        async for item in self._engine.generate(self.request):
            assert not self.results, f"{item} came behind the result"
            if isinstance(item, Chunk):
                assert item.token_ids
                self.token_ids += item.token_ids
                self.logprobs += item.logprobs
            else:
                self.results.append(item)
                known = len(done.token_ids) if done else 0
                assert not self.request.stream or list(item.token_ids[known:]) == self.token_ids
                assert not self.request.stream or list(item.logprobs[known:]) == self.logprobs
            self._came.set()
            self._came = anyio.Event()

    async def until(self, tokens: int) -> None:
        """Return once so many tokens have come; an error if the stream ends before."""
        with anyio.fail_after(_SOON_S):
            while len(self.token_ids) < tokens and not self.results:
                await self._came.wait()
        assert not self.results, f"it ended before it could be caught: {self.results}"


@asynccontextmanager
async def reading(trial: Trial, *requests: Request, tokens: int = 1) -> AsyncIterator[list[Stream]]:
    """Read requests while the context lasts, from when each has `tokens` tokens, and to their ends."""
    streams = [Stream(trial.engine, request) for request in requests]
    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(stream.result)
        for stream in streams:
            await stream.until(tokens)
        yield streams
    for stream in streams:
        check_result(stream.request, stream.results[0])


def check_result(request: Request, result: Result) -> None:
    """Check what holds for every result: log-probabilities, spans, limits."""
    sampling, tokens = request.sampling, result.token_ids
    assert len(result.logprobs) == len(tokens)
    assert all(value <= 1e-6 for value in result.logprobs)
    assert tiles(result.spans, len(tokens)), f"{result.spans} do not tile {len(tokens)} tokens"
    assert len(tokens) <= sampling.max_new_tokens
    assert not any(token in sampling.stop_ids for token in tokens[:-1])
    assert (result.finish == "error") == bool(result.error)
    if result.finish == "length":
        assert len(tokens) == sampling.max_new_tokens
    if request.done is not None:
        assert tokens[: len(request.done.token_ids)] == request.done.token_ids
        assert result.logprobs[: len(request.done.logprobs)] == request.done.logprobs


def tiles(spans: Spans, tokens: int) -> bool:
    """Say whether spans lie end to end from 0 to `tokens`, none empty, with versions that rise."""
    ends = [0, *(end for _, _, end in spans)]
    versions = [version for version, _, _ in spans]
    return (
        ends[-1] == tokens
        and all(first == end for (_, first, _), end in zip(spans, ends, strict=False))
        and all(first < end for _, first, end in spans)
        and versions == sorted(versions)
    )


def check_near(found: Sequence[float], expected: Sequence[float], limit: float = 1e-4) -> None:
    """Check that log-probabilities are those expected, to `limit`; an error tells the first and the worst one."""
    assert len(found) == len(expected), f"{len(found)} log-probabilities, {len(expected)} expected"
    off = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not abs(a - b) <= limit]
    worst = max(off, key=lambda i: abs(found[i] - expected[i]), default=0)
    told = [f"token {i}: {found[i]:.6f}, expected {expected[i]:.6f}" for i in (*off[:1], worst) if off]
    assert not off, f"{len(off)} of {len(found)} differ by more than {limit:g}; " + "; ".join(told)
