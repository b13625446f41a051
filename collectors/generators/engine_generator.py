"""A generator over an inference engine: one request per sample, put together to groups again.

Invariants: a group's completions stand in the order of its seeds, whichever of them are kept; with `exact`, groups that
were granted together decode as one batch and nothing else does, so that one seed gives one run.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import anyio

from asyncrl.collectors.engines.base import Cache, Engine, GroupEngine, Request, Result, Sampling, Update
from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.errors import GenerationError
from asyncrl.engine.weights.base import State

OnUpdate = Literal["keep", "recompute", "continue", "restart"]


@dataclass(eq=False, slots=True)
class _Together:
    """Groups that were granted together, `size` of them; complete once all have joined."""

    size: int
    requests: list[GroupRequest] = field(default_factory=list)
    results: list[list[Result]] = field(default_factory=list)
    error: GenerationError | None = None
    done: anyio.Event = field(default_factory=anyio.Event)


class EngineGenerator:
    """Serves groups from `engine`; `sampling` is what all requests share. `groups` is the engine, if it takes groups
    whole, which `exact` needs.

    `on_update` says what becomes of responses in flight when weights change: they go on under the new weights with
    their cache kept (`keep`) or made anew (`recompute`); or they are aborted and go on from their last token
    (`continue`), or from their prompt (`restart`).
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        *,
        groups: GroupEngine | None = None,
        exact: bool = False,
        on_update: OnUpdate = "keep",
    ) -> None:
        if exact and groups is None:
            raise ValueError("exact batches need an engine that takes groups whole")
        self._engine = engine
        self._sampling = sampling
        self._groups = groups
        self._exact = exact
        self._on_update = on_update
        self._numbers = count()
        self._gathering: dict[int, _Together] = {}
        self._send, self._complete = anyio.create_memory_object_stream[_Together](float("inf"))

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engine.run)
            async for together in self._complete:
                await self._decode(together)

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        results = await (self._join(request) if self._exact else self._generate(request))
        for result in results:
            if result.finish in ("error", "abort"):
                raise GenerationError(f"decoding it failed: {result.error or 'the engine aborted it'}")
        return [
            Completion(
                result.token_ids,
                result.logprobs,
                result.spans,
                finished=result.finish == "stop",
                experts=result.experts,
            )
            for result in results
        ]

    async def update_weights(self, version: int, state: State) -> Update:
        if self._on_update in ("keep", "recompute"):
            cache: Cache = "keep" if self._on_update == "keep" else "recompute"
            return await self._engine.update_weights(version, state, cache)
        try:
            await self._engine.pause("abort")
            return await self._engine.update_weights(version, state)
        finally:
            # Left paused, the engine would never serve again: also if this call is given up while it still halts.
            with anyio.CancelScope(shield=True):
                await self._engine.resume()

    async def sleep(self, cache: Cache) -> None:
        if self._groups is None:
            raise GenerationError("an engine outside of the collector's process does not leave its device")
        await self._groups.sleep(cache)

    async def wake(self) -> None:
        if self._groups is not None:
            await self._groups.wake()

    async def stats(self) -> dict[str, Any]:
        stats = await self._engine.stats()
        return {name: getattr(stats, name) for name in stats.__slots__}

    @property
    def exact(self) -> bool:
        """Whether groups that were granted together decode as one batch."""
        return self._exact

    def request(self, ids: tuple[int, ...], seed: int, *, max_new_tokens: int, temperature: float) -> Request:
        """Return a request of its own, with what all requests share."""
        sampling = replace(self._sampling, max_new_tokens=max_new_tokens, temperature=temperature)
        number = str(next(self._numbers))
        return Request(number, ids, sampling, seed, group=number)

    async def respond(self, request: Request, begun: Callable[[], None]) -> Result:
        """Return the response to one request; `begun` is called when it begins to decode."""
        (result,) = await self._all([request], begun)
        return result

    async def respond_together(self, requests: Sequence[Request]) -> list[Result]:
        """Return responses that decode as one batch, apart from all others; only of an engine that takes groups."""
        assert self._groups is not None
        return await self._groups.generate_batch(requests)

    def _requests(self, request: GroupRequest) -> list[Request]:
        number = next(self._numbers)
        sampling = replace(self._sampling, max_new_tokens=request.max_new_tokens, temperature=request.temperature)
        # One sample tells when the group begins to decode; the others need not wake anybody before they end.
        return [
            Request(f"{number}/{i}", request.prompt_ids, sampling, seed, group=str(number), stream=i == 0)
            for i, seed in enumerate(request.seeds)
        ]

    async def _generate(self, request: GroupRequest) -> list[Result]:
        requests = self._requests(request)
        begun = _once(lambda: request.turn(True))
        return await (self._first(requests, request.size, begun) if request.surplus else self._all(requests, begun))

    async def _first(self, requests: Sequence[Request], count: int, begun: Callable[[], None]) -> list[Result]:
        """Return the first `count` responses to end, in the order of their requests; the others are aborted.

        One that goes wrong is among them only if fewer than `count` end well.
        """
        well: dict[int, Result] = {}
        wrong: dict[int, Result] = {}

        async def one(place: int) -> None:
            (result,) = await self._all([requests[place]], begun)
            if result.finish in ("error", "abort"):
                wrong[place] = result
            elif len(well) < count:
                well[place] = result
                if len(well) == count:
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for place in range(len(requests)):
                tasks.start_soon(one, place)
        results = well if len(well) == count else {**well, **wrong}
        return [results[place] for place in sorted(results)]

    async def _all(self, requests: Sequence[Request], begun: Callable[[], None]) -> list[Result]:
        """Return all responses; those that an update aborted go on, or begin anew, as configured."""
        results = await self._results(requests, begun)
        while self._on_update in ("continue", "restart"):
            cut = [i for i, result in enumerate(results) if result.finish == "abort"]
            if not cut:
                break
            keep = self._on_update == "continue"
            again = [replace(requests[i], done=results[i] if keep else None) for i in cut]
            for i, result in zip(cut, await self._results(again, begun), strict=True):
                results[i] = result
        return results

    async def _results(self, requests: Sequence[Request], begun: Callable[[], None]) -> list[Result]:
        if self._groups is not None:
            return await self._groups.generate_group(requests, begun)
        results: dict[str, Result] = {}

        async def one(request: Request) -> None:
            results[request.id] = await self._read(request, begun)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
        return [results[request.id] for request in requests]

    async def _read(self, request: Request, begun: Callable[[], None]) -> Result:
        async with aclosing(self._engine.generate(request)) as items:
            async for item in items:
                begun()
                if isinstance(item, Result):
                    return item
        raise GenerationError(f"the engine ended request {request.id} without a result")

    async def _join(self, request: GroupRequest) -> list[Result]:
        together = self._gathering.setdefault(request.batch, _Together(request.peers))
        place = len(together.requests)
        together.requests.append(request)
        if len(together.requests) == together.size:
            del self._gathering[request.batch]
            self._send.send_nowait(together)
        await together.done.wait()
        if together.error is not None:
            raise together.error
        return together.results[place]

    async def _decode(self, together: _Together) -> None:
        assert self._groups is not None
        for request in together.requests:
            request.turn(True)
        samples = [self._requests(request) for request in together.requests]
        try:
            flat = iter(await self._groups.generate_batch([sample for group in samples for sample in group]))
            together.results = [[next(flat) for _ in group] for group in samples]
        except GenerationError as error:
            together.error = error
        finally:
            together.done.set()


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return what makes a call the first time alone."""
    called = False

    def first() -> None:
        nonlocal called
        if not called:
            called = True
            call()

    return first
