"""Bursts ahead, on a decoder that makes one token like the other."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.batcher import Batcher
from asyncrl.collectors.engines.response import Response
from asyncrl.collectors.engines.rows import Seat
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.aio.blocking import in_place

BURST, STOP = 2, 9


class Made:
    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = rows

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        return self._rows, [[-1.0] * len(row) for row in self._rows]


class Rows:
    """A decoder of two slots; slot 1 stops at its `stops`-th token."""

    slots, length, records_experts = 2, 64, False

    def __init__(self, stops: int) -> None:
        self.bursts: list[tuple[int, int]] = []
        self._stops = stops
        self._made = [0, 0]
        self._limits = [0, 0]

    def fill(self, *_: Any, **__: Any) -> None: ...

    def share(self, *_: Any) -> None: ...

    def move(self, *_: Any) -> None: ...

    def experts(self, *_: Any) -> None: ...

    def seat(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            self._made[seat.slot], self._limits[seat.slot] = 0, seat.sampling.max_new_tokens

    def burst(self, rows: int, positions: int, *, steps: int, filtered: bool) -> Made:
        self.bursts.append((steps, positions))
        return Made([[self._next(slot) for _ in range(steps)] for slot in range(rows)])

    def _next(self, slot: int) -> int:
        if self._made[slot] >= self._limits[slot]:
            return -1
        self._made[slot] += 1
        if slot == 1 and self._made[slot] == self._stops:
            self._limits[slot] = 0
            return STOP
        return 5


def flights(
    *, ahead: int, limits: tuple[int, int], stops: int = 0, turns: int
) -> tuple[list[int], Rows, list[Response]]:
    """Return how many bursts are under way after each turn, the decoder, and the responses."""
    decoder = Rows(stops)
    settings = NativeSettings(2, 64, 2**20, burst=BURST)
    batcher = Batcher(decoder, settings, text=None, blocking=in_place, ahead=ahead)  # type: ignore[arg-type]
    responses = [
        Response(Request(str(i), (3, 4), Sampling(limit, stop_ids=(STOP,)), 0)) for i, limit in enumerate(limits)
    ]
    seen = []

    async def main() -> None:
        for response in responses:
            batcher.put(response)
        await batcher.admit(begun_only=False)
        for _ in range(turns):
            if batcher.running:
                await batcher.advance(0)
            seen.append(len(batcher._flights))
        await batcher.catch_up()

    anyio.run(main)
    return seen, decoder, responses


def test_a_burst_is_ahead_of_the_one_that_is_taken() -> None:
    seen, decoder, _ = flights(ahead=1, limits=(12, 12), turns=3)
    assert seen == [1, 1, 1]
    # The prompt's two positions but for its last token's, which the first step takes.
    assert decoder.bursts == [(2, 4), (2, 6), (2, 8)]


@pytest.mark.parametrize("stops", [3, 4])
def test_a_token_that_stops_ends_a_response_when_its_burst_is_taken(stops: int) -> None:
    """In the second burst of two tokens, which the third turn takes."""
    _, _, responses = flights(ahead=1, limits=(12, 12), stops=stops, turns=3)
    assert responses[1].ended
    assert responses[1].made == stops


def test_no_burst_has_nothing_to_make() -> None:
    """Three bursts of two tokens and one of one: a step that makes nothing would take as long as any other."""
    for ahead in (0, 1):
        _, decoder, responses = flights(ahead=ahead, limits=(7, 7), turns=8)
        assert [response.made for response in responses] == [7, 7]
        assert sum(steps for steps, _ in decoder.bursts) == 7


def test_no_burst_is_ahead_on_a_cpu() -> None:
    seen, _, _ = flights(ahead=0, limits=(12, 12), turns=3)
    assert seen == [0, 0, 0]
