"""The native engine: a transformers model that decodes in this process, by continuous batching over a static cache.

Invariants: weights are swapped between two bursts, staged before; each burst is of one version, which every token of it
is stamped with; a batch that is to be exact has no update within it, and no sleep.

```
generate ─▶ queue ─▶ run: control (sleep, update, reset, pause) ─▶ admit ─▶ burst ─▶ chunks and results
```
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from asyncrl.collectors.engines.base import Cache, Chunk, EngineStats, Finish, InFlight, Request, Result, Update
from asyncrl.collectors.engines.batcher import Batcher
from asyncrl.collectors.engines.checks import check_decoding, fault
from asyncrl.collectors.engines.decoder import Decoder
from asyncrl.collectors.engines.response import Response
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.engines.slots import Batch
from asyncrl.collectors.engines.staged import Staged, stage
from asyncrl.collectors.engines.stop_text import Text
from asyncrl.collectors.engines.stopwatch import Stopwatch
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.errors import GenerationError, VersionError
from asyncrl.engine.model.device import on_device
from asyncrl.engine.model.sketch import vocabulary

_MOST_FAILURES = 3
"""Bursts in a row that fail before the engine gives up: what fails ever again is the device or the model."""


@dataclass(eq=False, slots=True)
class _Control:
    """What is to happen between two bursts: new weights, unless `staged` is None, and a cache kept or made anew."""

    cache: Cache
    version: int = 0
    staged: Staged | None = None
    pause_s: float = 0.0
    done: bool = False


class NativeEngine:
    """Serves `model`, whose attention it takes over and whose weights it changes; ConfigError if it cannot decode it.

    `blocking` runs blocking calls in a thread or in place. `text` gives the text of tokens, for stop strings.
    """

    def __init__(
        self,
        model: Any,
        settings: NativeSettings,
        *,
        blocking: Blocking[Any],
        text: Text | None = None,
        version: int = 0,
    ) -> None:
        check_decoding(model)
        self._model = model
        self._settings = settings
        device = next(model.parameters()).device
        self._blocking = blocking = on_device(blocking, device)
        self._has_text = text is not None
        self._vocabulary = vocabulary(model)
        self._decoder = Decoder(model, settings)
        ahead = (1 if device.type == "cuda" else 0) if settings.ahead is None else settings.ahead
        self._batcher = Batcher(self._decoder, settings, text=text, blocking=blocking, ahead=ahead)
        self._version = version
        self._controls: deque[_Control] = deque()
        self._updating: int | None = None
        self._pause: InFlight | None = None
        self._halted = False
        self._sleep: Cache | None = None
        self._asleep = self._stale_cache = False
        self._serving = False
        self._over = ""
        self._failures = 0
        self._watch = Stopwatch()
        self._changed = Signal()

    @property
    def slots(self) -> int:
        """How many sequences decode together."""
        return self._decoder.slots

    async def prepare(self) -> None:
        """Capture and compile what decoding needs, before `run`; GenerationError if the engine runs already.

        Two threads that capture CUDA graphs at once fail each other.
        """
        if self._serving:
            raise GenerationError("an engine that runs cannot be prepared any more: call prepare() before run()")
        await self._blocking(self._decoder.prepare)

    async def run(self) -> None:
        self._serving = True
        finish: Finish = "abort"
        try:
            if self._settings.compiled:
                # In the middle of a group's time the minute that it takes would be the group's.
                await self._blocking(self._decoder.prepare)
            while True:
                await self._turn()
        except Exception as error:  # The edge of the engine: what it cannot mend ends every request, with the cause.
            finish, self._over = "error", str(error) if isinstance(error, GenerationError) else repr(error)
            raise
        finally:
            self._serving = False
            self._over = self._over or "the engine has stopped"
            self._batcher.end(finish, self._over if finish == "error" else "")
            self._changed.notify()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        response = self._accept(request)
        if not response.ended:
            self._batcher.put(response)
            self._changed.notify()
        try:
            async with aclosing(response.items()) as items:
                async for item in items:
                    yield item
        finally:
            self._give_up([response])

    async def generate_group(self, requests: Sequence[Request], begun: Callable[[], None]) -> list[Result]:
        responses = [self._accept(replace(request, stream=False), begun) for request in requests]
        for response in responses:
            if not response.ended:
                self._batcher.put(response)
        self._changed.notify()
        try:
            return [await response.wait() for response in responses]
        finally:
            self._give_up(responses)

    async def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        responses = [self._accept(replace(request, stream=False)) for request in requests]
        self._batcher.put(Batch([response for response in responses if not response.ended]))
        self._changed.notify()
        try:
            return [await response.wait() for response in responses]
        finally:
            self._give_up(responses)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        self._batcher.end("abort", ids=None if ids is None else frozenset(ids))
        self._changed.notify()
        await checkpoint()

    async def pause(self, in_flight: InFlight = "keep") -> None:
        self._pause, self._halted = in_flight, False
        if in_flight == "abort":
            self._batcher.end("abort")
        self._changed.notify()
        await self._settled(lambda: self._halted or self._pause is None, f"pause ({in_flight})")

    async def resume(self) -> None:
        self._pause, self._halted = None, False
        self._changed.notify()
        await checkpoint()

    async def sleep(self, cache: Cache = "keep") -> None:
        self._sleep = self._sleep or cache
        self._changed.notify()
        await self._settled(lambda: self._asleep or self._sleep is None, "sleep")

    async def wake(self) -> None:
        self._sleep = None
        self._changed.notify()
        await self._settled(lambda: not self._asleep or self._sleep is not None, "wake")

    async def update_weights(self, version: int, state: Mapping[str, Any], cache: Cache = "keep") -> Update:
        if self._updating is not None:
            raise VersionError(f"update to version {version} while {self._updating} is under way")
        if version < self._version:
            raise VersionError(f"the engine serves version {self._version} and was given {version}")
        self._updating = version
        try:
            started = anyio.current_time()
            staged = await self._blocking(lambda: stage(self._model, state))
            stage_s = anyio.current_time() - started
            control = _Control(cache, version, staged)
            await self._control(control, f"update to version {version}")
        finally:
            self._updating = None
        return Update(stage_s, control.pause_s, staged.bytes)

    async def reset_cache(self) -> None:
        await self._control(_Control("recompute"), "reset of the cache")

    async def stats(self) -> EngineStats:
        await checkpoint()
        batcher = self._batcher
        busy_s, paused_s = self._watch.read()
        return EngineStats(
            running=batcher.running,
            waiting=batcher.waiting,
            cache_used=batcher.cache_used,
            tokens=batcher.tokens,
            busy_s=busy_s,
            paused_s=paused_s,
            version=self._version,
        )

    async def close(self) -> None:
        self._over = self._over or "the engine is closed"
        self._batcher.end("abort")
        self._changed.notify()
        await checkpoint()

    def _accept(self, request: Request, begun: Callable[[], None] | None = None) -> Response:
        """Return a response, which has ended if there is nothing to generate."""
        response = Response(request) if begun is None else Response(request, begun)
        done, sampling = request.done, request.sampling
        why = self._over or fault(
            request, length=self._settings.length, vocabulary_size=self._vocabulary, has_text=self._has_text
        )
        if why:
            response.end("error", why)
        elif done is not None and done.finish in ("stop", "length"):
            response.end(done.finish)
        elif response.made >= sampling.max_new_tokens:
            response.end("length")
        return response

    def _give_up(self, responses: Sequence[Response]) -> None:
        for response in responses:
            self._batcher.drop(response)
        self._changed.notify()

    async def _control(self, control: _Control, what: str) -> None:
        self._controls.append(control)
        self._changed.notify()
        try:
            await self._settled(lambda: control.done, what)
        finally:
            if control in self._controls:
                self._controls.remove(control)

    async def _settled(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the loop has done what it was asked; GenerationError if it no longer runs."""
        await self._changed.wait_for(
            lambda: condition() or bool(self._over), timeout_s=self._settings.control_timeout_s, what=lambda: what
        )
        if not condition():
            raise GenerationError(f"{what}: {self._over}")

    async def _turn(self) -> None:
        if self._movable():
            await self._move()
        elif self._controllable():
            await self._apply(self._controls.popleft())
        elif self._asleep:
            self._halted = self._stands_still()
            self._changed.notify()
            await self._until(lambda: self._movable() or self._controllable() or self._halted != self._stands_still())
        elif self._stands_still():
            await self._batcher.catch_up()
            self._halted = True
            self._watch.turn(paused=True)
            self._changed.notify()
            await self._until(lambda: not self._halted or self._movable() or self._controllable())
            self._watch.turn(paused=False)
        else:
            self._watch.turn(busy=self._batcher.ready)
            await self._batcher.admit(begun_only=self._pause is not None)
            if self._batcher.running:
                await self._advance()
            else:
                self._watch.turn(busy=False)
                await self._batcher.catch_up()
                await self._until(lambda: bool(self._controls or self._pause or self._batcher.ready) or self._movable())

    async def _move(self) -> None:
        """Leave the device, or come back to it."""
        await self._batcher.catch_up()
        self._watch.turn(paused=True)
        if self._sleep is not None:
            self._stale_cache = self._sleep == "recompute"
            await self._batcher.leave(keep=not self._stale_cache)
            self._asleep = True
        else:
            await self._batcher.come_back()
            self._asleep = False
            if self._stale_cache:
                await self._batcher.refill()
            self._watch.turn(paused=self._halted)
        self._changed.notify()

    async def _advance(self) -> None:
        try:
            await self._batcher.advance(self._version)
            self._failures = 0
        except Exception as error:  # The edge of the model's own code: whoever sits may be at fault, or the device.
            self._failures += 1
            self._batcher.drop_flights()
            self._batcher.end("error", f"decoding failed: {error!r}", waiting=False)
            if self._failures == _MOST_FAILURES:
                raise GenerationError(f"{_MOST_FAILURES} passes in a row failed, the last with {error!r}") from error

    async def _apply(self, control: _Control) -> None:
        await self._batcher.catch_up()
        self._watch.turn(paused=True)
        started = anyio.current_time()
        if control.staged is not None:
            await self._blocking(control.staged.swap)
            self._version = control.version
        if control.cache == "recompute" and self._asleep:
            self._stale_cache = True
        elif control.cache == "recompute":
            await self._batcher.refill()
        else:
            self._batcher.forget()
        control.pause_s = anyio.current_time() - started
        self._watch.turn(paused=self._halted or self._asleep)
        control.done = True
        self._changed.notify()

    def _controllable(self) -> bool:
        """Say whether something is to be done between two bursts, and may be: not within a batch that is exact."""
        return bool(self._controls) and not self._batcher.apart

    def _movable(self) -> bool:
        """Say whether the engine is to leave its device, or to come back: not within a batch that is exact."""
        return self._asleep != (self._sleep is not None) and not self._batcher.apart

    def _stands_still(self) -> bool:
        return self._pause is not None and (self._pause != "drain" or self._drained())

    def _drained(self) -> bool:
        return not self._batcher.running and not self._batcher.apart

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not await self._changed.wait_at_most(condition, 3600.0):
            pass
