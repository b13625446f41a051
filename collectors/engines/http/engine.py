"""Inference servers over HTTP behind the engine protocol, as many replicas as there are.

Invariant: no request is lost with a replica: it is asked again elsewhere, behind the tokens it has. Whoever holds,
releases or updates the replicas has `_control`. Pauses that drain or abort are made of this engine's own requests, so
that a server needs one kind of pause only, in place.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import anyio
import torch

from asyncrl.collectors.engines.admission import Flight
from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Cache, Chunk, InFlight, Request, Result
from asyncrl.collectors.engines.elsewhere import EngineElsewhere
from asyncrl.collectors.engines.http.client import Client, Refused, ServerDown
from asyncrl.collectors.engines.http.fleet import Fleet
from asyncrl.collectors.engines.http.kinds import KINDS
from asyncrl.collectors.engines.http.routing import Replica, Router
from asyncrl.collectors.engines.http.server import Reply
from asyncrl.collectors.engines.http.settings import HTTPSettings
from asyncrl.collectors.engines.in_flight import InFlightLimit
from asyncrl.collectors.engines.state_files import StateFiles
from asyncrl.collectors.engines.stop_text import Text
from asyncrl.engine.errors import AsyncRLError, GenerationError, VersionError

_PROBE_EVERY_S = 2.0
_PROBES_PER_OUTAGE = 10
_PRESSURE_EVERY_S = 0.25
"""Time between two questions how full a replica is: a limit grows by one with each at most; each costs it some ms."""
_ABORT_AGAIN_S = 0.5
_ABORT_TRIES = 20
_ROUNDS = 5
"""So often a request is asked for whose server ended it unasked, as one does that shuts down."""


@dataclass(eq=False, slots=True)
class _Asked:
    """Where a request is now, and what it is called there."""

    replica: Replica
    name: str


class HTTPEngine(EngineElsewhere):
    """Stop strings need the `text` of tokens, special ones included."""

    def __init__(self, settings: HTTPSettings, *, text: Text | None = None) -> None:
        make, folder = KINDS[settings.kind], Path(settings.model_path)
        self._settings = settings
        self._probe_every_s = min(_PROBE_EVERY_S, settings.outage_s / _PROBES_PER_OUTAGE)
        replicas = [
            Replica(make(Client(url, timeout_s=settings.answer_s), folder), url, InFlightLimit(settings.rows))
            for url in settings.urls
        ]
        self._router = Router(replicas)
        super().__init__(max_length=settings.max_length, limit=self._router.limit, text=text)
        self._fleet = Fleet(self._router, self._admission.admit, settings.answer_s)
        self._files = StateFiles(settings.model_path, getattr(torch, settings.dtype), Path(settings.weights_folder))
        self._asked: dict[Flight, _Asked] = {}
        self._names = 0

    async def run(self) -> None:
        """Probe the replicas until cancelled; GenerationError after `outage_s` without any."""
        self._admission.open()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._adapt)
                await self._probe_until_outage()
                tasks.cancel_scope.cancel()
            raise GenerationError(self._outage())
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def _probe_until_outage(self) -> None:
        seen, outage_s = anyio.current_time(), self._settings.outage_s
        while self._router.up or anyio.current_time() - seen <= outage_s:
            # A replica that hangs answers no probe for long: an update must not wait for that.
            well = await self._fleet.probe()
            if well:
                async with self._control:
                    await self._fleet.take_back(well, self._version, self._files.served, held=self._paused)
            if self._router.up:
                seen = anyio.current_time()
            await anyio.sleep(self._probe_every_s)

    async def _adapt(self) -> None:
        """Ask the replicas how full they are while they generate: a held one stays full, and would be cut for it."""
        while True:
            await anyio.sleep(_PRESSURE_EVERY_S)
            if self._admission.running and not self._paused and not self._control.locked():
                await self._fleet.adapt()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests, all by default, each with the partial result `abort`, also while paused."""
        self._admission.end_waiting(ids)
        flights = [flight for flight in self._admission.running if ids is None or flight.request_id in ids]
        for flight in flights:
            flight.ending = "abort"
        # Those that wait for a replica.
        self._admission.tell()
        # A server forgets an abort that overtakes its request: it is told again until the request has ended.
        for _ in range(_ABORT_TRIES):
            asked = [self._asked[flight] for flight in flights if flight in self._asked]
            if not asked:
                return
            async with anyio.create_task_group() as tasks:
                for one in asked:
                    tasks.start_soon(self._abort, one)
            with anyio.move_on_after(_ABORT_AGAIN_S):
                await self._admission.until(lambda: not any(flight in self._asked for flight in flights))

    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Return once no forward pass runs. A `drain` can be cut short by an abort."""
        if in_flight == "abort":
            await self.abort()
        async with self._control:
            self._admission.close()
            if in_flight == "abort":  # What was let in meanwhile: held, it would go on under other weights.
                await self.abort()
            if in_flight == "drain":
                # Held before, they could not end.
                await self._fleet.go_on()
                await self._admission.drained()
            self._paused = True
            await self._fleet.hold()
            self._watch.turn(paused=True)

    async def reset_cache(self) -> None:
        """Forget what was cached of prompts; what is in flight continues on a cache made anew."""
        async with self._control:
            try:
                await self._fleet.hold(empty_cache=True)
            finally:
                await self._go_on()

    async def close(self) -> None:
        """Leave the servers, which go on without this engine; requests in flight end as aborted."""
        if self._closed:
            return
        self._closed = True
        self._admission.fail("the engine has ended", ending="abort")
        await self.abort()
        for replica in self._router.replicas:
            await replica.server.close()
        self._files.close()

    async def _ask(self, request: Request, answer: Answer, flight: Flight) -> AsyncGenerator[Chunk | Result, None]:
        """Ask one replica, and another if it dies, until the response ends."""
        error, rounds = flight.error, 0
        while not flight.ending and not answer.ended and answer.left > 0:
            replica = self._router.least()
            if replica is None:
                await self._admission.until(lambda: bool(self._router.up) or bool(flight.ending))
                continue
            version, ended, rounds = self._version, False, rounds + 1
            try:
                async with aclosing(self._replies(request, answer, flight, replica)) as replies:
                    while (reply := await replica.next(replies)) is not None:
                        chunk = answer.take(reply.token_ids, reply.logprobs)
                        self._tokens += len(reply.token_ids)
                        if reply.finish is not None:
                            answer.take_spans(reply.spans)
                            ended = True
                            unfinished = not answer.ended and answer.left > 0
                            if reply.finish == "error" or (rounds >= _ROUNDS and unfinished):
                                flight.ending, error = "error", f"{replica.url} ended the request {rounds} times"
                        if chunk is not None and request.stream:
                            yield chunk
                        if answer.ended and not ended:
                            await self._abort(self._asked[flight])
            except (ServerDown, Refused, ValueError) as failure:
                # The versions would have come last. Of those that served meanwhile, the oldest makes no token younger.
                answer.take_spans(((version, 0, answer.untold),))
                if isinstance(failure, ServerDown):
                    self._fleet.leave_out(replica, failure)
                else:
                    flight.ending, error = "error", str(failure)
        yield answer.result(flight.ending or ("stop" if answer.ended else "length"), error)

    async def _replies(
        self, request: Request, answer: Answer, flight: Flight, replica: Replica
    ) -> AsyncGenerator[Reply, None]:
        self._names += 1
        asked = self._asked[flight] = _Asked(replica, f"{request.id}-{self._names}")
        finished = False
        try:
            with self._router.out(replica):
                replies = replica.server.generate(asked.name, request, answer, f"version-{self._version}")
                async with aclosing(replies):
                    async for reply in replies:
                        finished = reply.finish is not None
                        yield reply
        finally:
            del self._asked[flight]
            self._admission.tell()
            if not finished and replica.up:
                with anyio.CancelScope(shield=True):
                    await self._abort(asked)

    async def _abort(self, asked: _Asked) -> None:
        try:
            await asked.replica.server.abort(asked.name)
        except GenerationError as error:
            # Its connection is closed next, which ends it too.
            self._fleet.leave_out(asked.replica, error)

    async def _ready_files(self) -> StateFiles:
        """Wait for a replica: the first update comes before the first probe, and any may fall into an outage."""
        # Twice as long as `run`, which is to end first.
        with anyio.move_on_after(2 * self._settings.outage_s):
            await self._admission.until(lambda: bool(self._router.up) or self._closed)
        if not self._router.up:
            raise VersionError(self._outage())
        return self._files

    def _cache_used(self) -> float:
        """Return the mean over the replicas that are up and tell it."""
        told = [replica.cache_used for replica in self._router.up if replica.tells]
        return sum(told) / len(told) if told else 0.0

    def _outage(self) -> str:
        limit_s = self._settings.outage_s
        return f"there was no server for {limit_s:g} s (collector.server_timeout_s): {self._router.causes}"

    async def _swap(self, version: int, file: Path, cache: Cache) -> float:
        """Swap the weights of all replicas; return for how many seconds no token was made."""
        async with self._control:
            self._admission.close()
            held = anyio.current_time()
            try:
                await self._fleet.hold(empty_cache=cache == "recompute")
                await self._fleet.swap(version, file, self._files.served, self._version)
            except AsyncRLError as error:
                self._files.remove(file)
                raise error if isinstance(error, VersionError) else VersionError(str(error)) from error
            else:
                self._files.serve(file)
                self._version = version
            finally:
                await self._go_on()
            return anyio.current_time() - held

    async def _go_on(self) -> None:
        """End a pause, unless the user's own lasts."""
        if not self._paused:
            await self._fleet.go_on()
            self._watch.turn(paused=False)
            self._admission.open()
