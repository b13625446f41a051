"""An engine without a model: each token says which version made it, and takes as long as the script says.

It keeps to the contract of engines, in real time and in virtual time alike.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from asyncrl.collectors.engines.base import Cache, Chunk, EngineStats, InFlight, Request, Result, Update
from asyncrl.collectors.engines.response import Response
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.errors import VersionError

Make = Callable[[Request, int, int], int]
"""(request, index, version) → the token at that place in the response."""

_CONTROL_TIMEOUT_S = 600.0


def version_token(_request: Request, _index: int, version: int) -> int:
    """Return the version as a token."""
    return version


class ScriptedEngine:
    """`rows` responses get a token each every `token_s`; an update is staged for `stage_s` and swapped for `swap_s`.

    `state` shows which names and shapes weights have. Sequences have at most `length` tokens.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        rows: int = 8,
        length: int = 1024,
        token_s: float = 0.0,
        stage_s: float = 0.0,
        swap_s: float = 0.0,
        make: Make = version_token,
    ) -> None:
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._rows, self._length = rows, length
        self._token_s, self._stage_s, self._swap_s = token_s, stage_s, swap_s
        self._make = make
        self._running: list[Response] = []
        self._waiting: deque[Response] = deque()
        self._version = self._tokens = 0
        self._busy_s = self._paused_s = 0.0
        self._pause: InFlight | None = None
        self._swapping = self._updating = self._asleep = False
        self._changed = Signal()

    async def run(self) -> None:
        try:
            while True:
                await self._turn()
        finally:
            self._end(None)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        response = Response(request)
        needed = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not request.prompt_ids or needed > self._length:
            response.end("error", f"{len(request.prompt_ids)} prompt tokens, {needed} in all of {self._length}")
        elif response.made >= request.sampling.max_new_tokens:
            response.end("length")
        else:
            self._waiting.append(response)
            self._changed.notify()
        try:
            async with aclosing(response.items()) as items:
                async for item in items:
                    yield item
        finally:
            response.end("abort")
            self._sweep()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        self._end(ids)
        await checkpoint()

    async def pause(self, in_flight: InFlight = "keep") -> None:
        self._pause = in_flight
        if in_flight == "abort":
            self._end(None)
        self._changed.notify()
        await self._changed.wait_for(
            lambda: self._pause != "drain" or not self._running, timeout_s=_CONTROL_TIMEOUT_S, what=lambda: "pause"
        )
        await checkpoint()

    async def resume(self) -> None:
        self._pause = None
        self._changed.notify()
        await checkpoint()

    async def sleep(self, cache: Cache = "keep") -> None:
        self._asleep = True
        self._changed.notify()
        await checkpoint()

    async def wake(self) -> None:
        self._asleep = False
        self._changed.notify()
        await checkpoint()

    async def update_weights(self, version: int, state: Mapping[str, Any], cache: Cache = "keep") -> Update:
        if self._updating or version < self._version:
            raise VersionError(f"the engine serves version {self._version} and was given {version}")
        if {name: tensor.shape for name, tensor in state.items()} != self._shapes:
            raise VersionError(f"version {version}: names or shapes differ from {self._shapes}")
        self._updating = True
        try:
            await anyio.sleep(self._stage_s)
            self._swapping = True
            await anyio.sleep(self._swap_s)
            self._version = version
        finally:
            self._updating = self._swapping = False
            self._changed.notify()
        return Update(self._stage_s, self._swap_s, sum(tensor.nbytes for tensor in state.values()))

    async def reset_cache(self) -> None:
        await checkpoint()

    async def stats(self) -> EngineStats:
        await checkpoint()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            cache_used=len(self._running) / self._rows,
            tokens=self._tokens,
            busy_s=self._busy_s,
            paused_s=self._paused_s,
            version=self._version,
        )

    async def close(self) -> None:
        self._end(None)
        await checkpoint()

    async def _turn(self) -> None:
        started = anyio.current_time()
        if self._held or not (self._running or self._waiting):
            await self._changed.wait_at_most(lambda: not self._held and bool(self._running or self._waiting), 3600.0)
            self._paused_s += anyio.current_time() - started
            return
        while self._pause is None and self._waiting and len(self._running) < self._rows:
            self._running.append(self._waiting.popleft())
        await anyio.sleep(self._token_s)
        if self._held:
            return
        for response in self._running:
            self._add(response)
        self._busy_s += anyio.current_time() - started
        self._sweep()

    @property
    def _held(self) -> bool:
        return (
            self._swapping
            or self._asleep
            or (self._pause is not None and (self._pause != "drain" or not self._running))
        )

    def _add(self, response: Response) -> None:
        token = self._make(response.request, response.made, self._version)
        response.add([token], [-0.1 * (1 + self._version % 8)], self._version)
        self._tokens += 1
        if token in response.sampling.stop_ids:
            response.end("stop")
        elif response.made >= response.sampling.max_new_tokens:
            response.end("length")

    def _end(self, ids: Sequence[str] | None) -> None:
        for response in (*self._running, *self._waiting):
            if ids is None or response.request.id in ids:
                response.end("abort")
        self._sweep()

    def _sweep(self) -> None:
        self._running = [response for response in self._running if not response.ended]
        self._waiting = deque(response for response in self._waiting if not response.ended)
        self._changed.notify()
