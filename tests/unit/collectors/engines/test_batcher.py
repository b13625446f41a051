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
from asyncrl.collectors.engines.slots import Batch
from asyncrl.engine.aio.blocking import in_place

BURST, STOP = 2, 9


class Made:
    def __init__(self, rows: list[list[int]], told: list[str]) -> None:
        self._rows = rows
        self._told = told

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        self._told.append("read")
        return self._rows, [[-1.0] * len(row) for row in self._rows]


class Rows:
    """A decoder of two slots; slot 1 stops at its `stops`-th token."""

    slots, length = 2, 64

    def __init__(self, stops: int = 0, *, records_experts: bool = False) -> None:
        self.records_experts = records_experts
        self.bursts: list[tuple[int, int]] = []
        self.told: list[str] = []
        self._stops = stops
        self._made = [0, 0]
        self._limits = [0, 0]

    def fill(self, *_: Any, **__: Any) -> None: ...

    def share(self, *_: Any) -> None: ...

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for at, to in zip(sources, targets, strict=True):
            self._made[to], self._limits[to] = self._made[at], self._limits[at]

    def experts(self, *_: Any) -> None: ...

    def close(self, slot: int) -> None:
        """Have a row make no more, without a stop."""
        self._limits[slot] = 0

    def seat(self, seats: Sequence[Seat]) -> None:
        self.told.append("seat")
        for seat in seats:
            self._made[seat.slot], self._limits[seat.slot] = 0, seat.sampling.max_new_tokens

    def burst(self, rows: int, positions: int, *, steps: int, filtered: bool) -> Made:
        self.bursts.append((steps, positions))
        self.told.append("burst")
        return Made([[self._next(slot) for _ in range(steps)] for slot in range(rows)], self.told)

    def _next(self, slot: int) -> int:
        if self._made[slot] >= self._limits[slot]:
            return -1
        self._made[slot] += 1
        if slot == 1 and self._made[slot] == self._stops:
            self._limits[slot] = 0
            return STOP
        return 5


def batcher_of(decoder: Rows, *, ahead: int) -> Batcher:
    settings = NativeSettings(2, 64, 2**20, burst=BURST)
    return Batcher(decoder, settings, text=None, blocking=in_place, ahead=ahead)  # type: ignore[arg-type]


def queue_of(decoder: Rows, *limits: int) -> tuple[Batcher, list[Response]]:
    """Return a batcher with a burst ahead, and responses that wait in it."""
    batcher, responses = batcher_of(decoder, ahead=1), waiting(*limits)
    for response in responses:
        batcher.put(response)
    return batcher, responses


def waiting(*limits: int) -> list[Response]:
    return [Response(Request(str(i), (3, 4), Sampling(limit, stop_ids=(STOP,)), 0)) for i, limit in enumerate(limits)]


async def turns(batcher: Batcher, count: int, version: int = 0) -> None:
    """Take turns as the engine does, while anybody sits."""
    for _ in range(count):
        await batcher.admit(begun_only=False)
        if not batcher.running:
            break
        await batcher.advance(version)


def flights(
    *, ahead: int, limits: tuple[int, int], stops: int = 0, turns: int
) -> tuple[list[int], Rows, list[Response]]:
    """Return how many bursts are under way after each turn, the decoder, and the responses."""
    decoder = Rows(stops)
    batcher = batcher_of(decoder, ahead=ahead)
    responses = waiting(*limits)
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


def test_who_waits_sits_down_while_the_last_tokens_of_another_are_under_way() -> None:
    """Else the device waits at the end of each wave of answers for the host to take them and fill the next prompts."""
    decoder = Rows()
    batcher, responses = queue_of(decoder, 4, 4, 4, 4)

    async def main() -> None:
        await turns(batcher, 2)
        # The second burst is the last one of both. Nothing is taken before who waits sits behind it.
        assert decoder.told == ["seat", "burst", "burst"]
        await turns(batcher, 1)
        assert decoder.told[3:] == ["seat", "burst", "read", "read"]
        assert [response.ended for response in responses] == [True, True, False, False]
        await turns(batcher, 2)
        await batcher.catch_up()

    anyio.run(main)
    assert [response.result.token_ids for response in responses] == [(5,) * 4] * 4
    assert [steps for steps, _ in decoder.bursts] == [2, 2, 2, 2]
    assert batcher.tokens == 16


def test_only_who_is_sure_to_end_leaves_early_and_only_for_who_waits() -> None:
    decoder = Rows()
    batcher, responses = batcher_of(decoder, ahead=1), waiting(4, 12, 6)

    async def main() -> None:
        for response in responses[:2]:
            batcher.put(response)
        await turns(batcher, 2)
        # The first one's last tokens are under way, and nobody waits.
        await batcher.admit(begun_only=False)
        assert batcher.running == 2
        batcher.put(responses[2])
        await batcher.admit(begun_only=True)
        assert batcher.running == 2
        assert batcher.waiting == 1
        await batcher.admit(begun_only=False)
        assert (batcher.running, batcher.waiting) == (2, 0)
        await turns(batcher, 8)
        await batcher.catch_up()

    anyio.run(main)
    assert [response.made for response in responses] == [4, 12, 6]


@pytest.mark.parametrize("why", ["exact", "experts", "not ahead"])
def test_nobody_leaves_early_for_a_batch_apart_or_with_experts_to_be_read(why: str) -> None:
    decoder = Rows(records_experts=why == "experts")
    batcher, responses = batcher_of(decoder, ahead=0 if why == "not ahead" else 1), waiting(4, 4, 4, 4)

    async def main() -> None:
        batcher.put(responses[0])
        batcher.put(responses[1])
        if why == "exact":
            batcher.put(Batch(responses[2:]))
        else:
            batcher.put(responses[2])
            batcher.put(responses[3])
        await turns(batcher, 9)
        await batcher.catch_up()

    anyio.run(main)
    assert [response.made for response in responses] == [4] * 4
    # All that the first two made has been read before the next ones sit down.
    assert decoder.told[: decoder.told.index("seat", 1)].count("read") == 2


@pytest.mark.parametrize("how", ["abort", "one", "lost"])
def test_who_has_left_early_can_still_be_ended(how: str) -> None:
    """By an abort, of all or of one, or as the burst with its last tokens is lost: whoever waits for it must hear."""
    decoder = Rows()
    batcher, responses = queue_of(decoder, 6, 6, 6)

    async def main() -> None:
        await turns(batcher, 3)
        await batcher.admit(begun_only=False)
        (left,) = [response for response in responses[:2] if response.slot < 0]
        if how == "one":
            batcher.end("abort", ids=frozenset({left.request.id}))
        elif how == "abort":
            batcher.end("abort")
        else:
            batcher.drop_flights()
            batcher.end("error", "the device is gone", waiting=False)
        assert left.ended
        assert left.result.finish == ("error" if how == "lost" else "abort")
        assert left.result.token_ids == (5, 5)
        await turns(batcher, 9)
        await batcher.catch_up()
        assert left.made == 2
        assert [response.ended for response in responses] == [True] * 3
        if how == "one":
            assert [response.made for response in responses if response is not left] == [6, 6]

    anyio.run(main)


def test_where_some_go_on_the_burst_before_is_taken_though_others_leave() -> None:
    """Their tokens may stop them: the longer that is not read, the more is made for nobody."""
    decoder = Rows()
    batcher, responses = queue_of(decoder, 4, 12, 4)

    async def main() -> None:
        await turns(batcher, 2)
        assert decoder.told == ["seat", "burst", "burst", "read"]
        await turns(batcher, 9)
        await batcher.catch_up()

    anyio.run(main)
    assert [response.made for response in responses] == [4, 12, 4]


def test_who_waits_while_nobody_may_sit_down_keeps_no_tokens_from_being_taken() -> None:
    """A pause lets nobody sit down; what is under way is taken all the same."""
    decoder = Rows()
    batcher, responses = queue_of(decoder, 4, 4, 4)

    async def main() -> None:
        await turns(batcher, 2)
        while batcher.running:
            await batcher.admit(begun_only=True)
            if batcher.running:
                await batcher.advance(0)
        assert [response.made for response in responses] == [4, 4, 0]

    anyio.run(main)


def test_who_left_early_and_lacks_tokens_ends_as_an_error() -> None:
    """Without a slot nobody else would end it, and its group would wait for ever."""
    decoder = Rows()
    batcher, responses = queue_of(decoder, 6, 6, 6, 6)

    async def main() -> None:
        await turns(batcher, 2)
        decoder.close(0)
        await turns(batcher, 9)
        await batcher.catch_up()

    anyio.run(main)
    assert responses[0].result.finish == "error"
    assert "closed after 4 tokens" in responses[0].result.error
    assert [response.result.finish for response in responses[1:]] == ["length"] * 3
