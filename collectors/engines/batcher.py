"""Continuous batching: responses are seated in slots, decoded in bursts, and replaced by the next as they end.

```
waiting ─▶ sit: fill the prompt, once per group ─▶ burst: a few tokens in every row ─▶ take: what was made, who ended
   ▲                                                                                    │
   └───────────────────────── a slot that is free is filled before the next burst ◀─────┘
```

On a GPU one burst is always ahead: the device makes the next tokens while the host takes the last ones. A response
that ended in the burst before makes nothing in that one. One whose last tokens are under way, because its budget ends
there, leaves its slot to who waits at once: the device fills the next prompt right behind them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.engines.base import Finish
from asyncrl.collectors.engines.decoder import Burst, Decoder
from asyncrl.collectors.engines.response import Response
from asyncrl.collectors.engines.rows import Seat
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.collectors.engines.slots import Batch, Queue, Slots
from asyncrl.collectors.engines.stop_text import Text, completing, tail_tokens
from asyncrl.engine.aio.blocking import Blocking


@dataclass(frozen=True, slots=True)
class _Flight:
    """A burst that the device works on, who sat in which slot when it began, and the version that makes it."""

    burst: Burst
    steps: int
    seated: tuple[Response | None, ...]
    version: int


_Read = tuple[_Flight, list[list[int]], list[list[float]]]


class Batcher:
    """`text` gives the text of tokens, for stop strings; `ahead` bursts run before the last one is taken."""

    def __init__(
        self, decoder: Decoder, settings: NativeSettings, *, text: Text | None, blocking: Blocking[Any], ahead: int
    ) -> None:
        self._decoder = decoder
        self._settings = settings
        self._text = text
        self._blocking = blocking
        self._ahead = ahead
        self._slots = Slots(decoder.slots)
        self._queue = Queue()
        self._leaving: dict[Response, None] = {}
        self._flights: deque[_Flight] = deque()
        self._cache_number = 0
        self.tokens = 0

    @property
    def running(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def apart(self) -> bool:
        """Whether a batch sits that is to be exact."""
        return self._queue.batch is not None and not self._queue.batch.ended

    @property
    def cache_used(self) -> float:
        """The share of the cache's positions that hold a token of a response that sits."""
        return sum(response.position + 1 for response in self._slots) / (self._decoder.slots * self._decoder.length)

    @property
    def ready(self) -> bool:
        """Whether there is somebody to decode for."""
        return bool(self.running or self.waiting)

    def put(self, entry: Response | Batch) -> None:
        """Have a response, or a batch, wait for slots."""
        self._queue.put(entry)

    def end(self, finish: Finish, error: str = "", *, ids: frozenset[str] | None = None, waiting: bool = True) -> None:
        """End responses, all by default, that sit or wait, with what they have."""
        for response in (*self._slots, *self._leaving, *(self._queue.members() if waiting else ())):
            if ids is None or response.request.id in ids:
                self._end(response, finish, error)

    def drop(self, response: Response) -> None:
        """End a response, if it has not, whose reader is gone."""
        self._end(response, "abort")

    async def admit(self, *, begun_only: bool) -> None:
        """Seat who waits, as far as there are slots; with `begun_only`, only members of a batch that sits."""
        fresh: list[Response] = []
        spent = [] if begun_only else self._spent()
        while self._slots.free or spent:
            if not self._slots.free:
                if not self._queue.mixes:
                    break
                self._leave_early(spent.pop())
            response = self._queue.next(slots_empty=self._slots.free == self._decoder.slots, begun_only=begun_only)
            if response is None:
                break
            self._slots.sit(response)
            response.begun()
            fresh.append(response)
        if fresh:
            await self._seat(fresh)
        await self._close_up()

    async def advance(self, version: int) -> None:
        """Begin a burst, which `version` makes, and take the one before it, or this one if none is to be ahead.

        None begins if those under way make all that is left.
        """
        steps = min(self._settings.burst, max(map(_left, self._slots)))
        seated = self._slots.seated
        positions = self._positions()
        filtered = any(_filters(response) for response in self._slots)

        for response in self._slots:
            response.under_way += max(0, steps)
        # If this is the last burst of all who sit, nothing is taken before who waits sits down: the device is to have
        # their prompts by the time that it has made this.
        ahead = self._ahead + (self._ahead > 0 and self._queue.mixes and len(self._spent()) == self.running)

        def work() -> list[_Read]:
            if steps > 0:
                burst = self._decoder.burst(len(seated), positions, steps=steps, filtered=filtered)
                self._flights.append(_Flight(burst, steps, seated, version))
            read = [] if steps > 0 else [self._read()]
            while len(self._flights) > ahead:
                read.append(self._read())
            return read

        for one in await self._blocking(work):
            self._take(*one)

    async def catch_up(self) -> None:
        """Take every burst that has begun: then no forward pass runs."""
        while self._flights:
            self._take(*await self._blocking(self._read))

    def drop_flights(self) -> None:
        """Forget bursts that have begun; who has a part in them must then end."""
        self._flights.clear()

    def forget(self) -> None:
        """Do not share prompts that were filled before."""
        self._cache_number += 1

    async def refill(self) -> None:
        """Compute the cache of all who sit anew, of their tokens so far; every burst must have been taken."""
        self.forget()
        live = list(self._slots)
        await self._fill(live, record=False)
        if self._decoder.records_experts:
            return  # What is recorded of them is of their old weights: who sits down with the same prompt fills it.
        for response in live:
            response.filled_in = self._cache_number

    async def leave(self, *, keep: bool) -> None:
        """Free the device's memory; every burst must have been taken. Without `keep` the cache is lost."""
        slots, length = (len(self._slots.seated), self._positions()) if keep else (0, 0)
        await self._blocking(lambda: self._decoder.leave(slots, length))

    async def come_back(self) -> None:
        """Bring weights and cache back to the device."""
        await self._blocking(self._decoder.come_back)

    def _spent(self) -> list[Response]:
        """Return who makes all that is left of it in bursts under way, and may leave its slot before they are taken."""
        # What is recorded of experts is read from the slot when a response ends.
        if self._decoder.records_experts:
            return []
        return [response for response in self._slots if _left(response) <= 0]

    def _leave_early(self, response: Response) -> None:
        self._slots.leave(response)
        self._leaving[response] = None

    async def _seat(self, fresh: Sequence[Response]) -> None:
        """Fill the prompts of those that have just sat down, once per group, and have their rows begin."""
        filled = {_prompt(response): response for response in self._slots if response.filled_in == self._cache_number}
        fills: list[Response] = []
        copies: list[_Copy] = []
        for response in fresh:
            donor = filled.get(_prompt(response)) if response.request.group and not response.made else None
            if donor is None:
                fills.append(response)
            else:
                copies.append(_Copy(donor.slot, donor, response))
            filled.setdefault(_prompt(response), response)
            response.filled_in = self._cache_number
        await self._fill(fills)
        # A copy of nothing must not decode.
        alone = [copy for copy in copies if copy.donor in fills and copy.donor.ended]
        for copy in alone:
            # What fails of one prompt fails of the same prompt.
            if copy.donor.result.finish == "error":
                self._end(copy.to, "error", copy.donor.result.error)
        await self._fill([copy.to for copy in alone if not copy.to.ended])
        copies = [copy for copy in copies if copy not in alone and not copy.to.ended]
        sources, targets = [copy.slot for copy in copies], [copy.to.slot for copy in copies]
        seats = [_seat_of(response) for response in fresh if not response.ended]
        length = max((len(copy.to.request.prompt_ids) - 1 for copy in copies), default=0)

        def work() -> None:
            if length:
                self._decoder.share(sources, targets, length)
            if seats:
                self._decoder.seat(seats)

        await self._blocking(work)

    async def _fill(self, responses: Sequence[Response], *, record: bool = True) -> None:
        """Compute the cache of sequences but for their last tokens; one that fails alone ends as an error."""
        longest_first = sorted(responses, key=lambda response: -response.position)
        passes: list[list[Response]] = []
        for response in longest_first:
            if not response.position:
                continue
            if not passes or (len(passes[-1]) + 1) * passes[-1][0].position > self._settings.fill_tokens:
                passes.append([])
            passes[-1].append(response)
        for together in passes:
            if not await self._fill_pass(together, record) and len(together) > 1:
                for response in together:
                    await self._fill_pass([response], record)

    async def _fill_pass(self, responses: Sequence[Response], record: bool) -> bool:
        slots = [response.slot for response in responses if not response.ended]
        sequences = [response.sequence[:-1] for response in responses if not response.ended]
        if not slots:
            return True
        try:
            await self._blocking(lambda: self._decoder.fill(slots, sequences, record=record))
        except Exception as error:  # The edge of the model's own code: of several prompts, each is tried alone.
            if len(slots) == 1:
                for response in responses:
                    self._end(response, "error", f"its prompt could not be computed: {error!r}")
            return False
        return True

    async def _close_up(self) -> None:
        moves = self._slots.close_up()
        if moves:
            length = self._positions()
            sources, targets = [at for at, _ in moves], [to for _, to in moves]
            await self._blocking(lambda: self._decoder.move(sources, targets, length))

    def _positions(self) -> int:
        """Return how many positions rows come to use at most until the next burst ends, those under way included."""
        burst = self._settings.burst
        return max(
            (
                min(response.position + response.under_way + burst, _last_position(response)) + 1
                for response in self._slots
            ),
            default=1,
        )

    def _read(self) -> _Read:
        flight = self._flights.popleft()
        return flight, *flight.burst.read()

    def _take(self, flight: _Flight, tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        for response, made, of_made in zip(flight.seated, tokens, logprobs, strict=True):
            if response is None or response.ended:
                continue
            response.under_way -= flight.steps
            count = made.index(-1) if -1 in made else len(made)
            if count:
                self._add(response, made[:count], of_made[:count], flight.version)
            if response in self._leaving and not response.under_way:
                # Nobody would end it: it has no slot.
                self._end(response, "error", f"its row closed after {response.made} tokens without a reason")

    def _add(self, response: Response, tokens: list[int], logprobs: list[float], version: int) -> None:
        odd = None
        # Of finite numbers the sum is finite; one by one they take most of what the host does for a burst.
        if not math.isfinite(sum(logprobs)):
            odd = next((at for at, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if odd is not None:
            value, tokens, logprobs = logprobs[odd], tokens[:odd], logprobs[:odd]
        sampling, stopped = response.sampling, None
        if sampling.stop_strings and self._text:
            before = response.tail(tail_tokens(sampling.stop_strings))
            stopped = completing(self._text, before, tokens, sampling.stop_strings)
            tokens, logprobs = tokens[:stopped], logprobs[:stopped]
        response.add(tokens, logprobs, version)
        self.tokens += len(tokens)
        if stopped is not None or (tokens and tokens[-1] in sampling.stop_ids):
            self._end(response, "stop")
        elif odd is not None:
            self._end(response, "error", f"the log-probability of token {response.made} is {value}")
        elif response.made >= sampling.max_new_tokens:
            self._end(response, "length")

    def _end(self, response: Response, finish: Finish, error: str = "") -> None:
        if not response.ended and response.grew:
            experts = self._decoder.experts(response.slot, response.position)
            if experts is not None:
                response.chose(experts)
        response.end(finish, error)
        self._slots.leave(response)
        self._leaving.pop(response, None)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A prompt's cache goes from the slot that a donor has, or had, to a response's."""

    slot: int
    donor: Response
    to: Response


def _prompt(response: Response) -> tuple[str, tuple[int, ...]]:
    return response.request.group, response.request.prompt_ids


def _seat_of(response: Response) -> Seat:
    return Seat(
        response.slot,
        response.last_token,
        response.position,
        response.made,
        response.sampling,
        response.request.seed,
    )


def _left(response: Response) -> int:
    """Return how many tokens it may make beyond those under way."""
    return response.sampling.max_new_tokens - response.made - response.under_way


def _last_position(response: Response) -> int:
    return len(response.request.prompt_ids) + response.sampling.max_new_tokens - 1


def _filters(response: Response) -> bool:
    sampling = response.sampling
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or not sampling.temperature)
