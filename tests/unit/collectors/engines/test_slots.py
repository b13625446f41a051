"""Slots, their queue, spans, stop strings and the budget of the cache."""

from collections.abc import Sequence

import pytest

from asyncrl.collectors.engines.base import Request, Sampling
from asyncrl.collectors.engines.response import Response, join_spans, oldest_version
from asyncrl.collectors.engines.slot_cache import slots_within
from asyncrl.collectors.engines.slots import Batch, Queue, Slots
from asyncrl.collectors.engines.stop_text import completing, tail_tokens
from asyncrl.engine.errors import ConfigError


def response(name: str) -> Response:
    return Response(Request(name, (2,), Sampling(4), 0))


def names(slots: Slots) -> list[str | None]:
    return [held.request.id if held else None for held in slots.seated]


def seated(count: int, *ids: str) -> tuple[Slots, list[Response]]:
    slots, responses = Slots(count), [response(name) for name in ids]
    for each in responses:
        slots.sit(each)
    return slots, responses


def test_who_comes_fills_the_first_hole() -> None:
    slots, (_, b, _) = seated(4, "a", "b", "c")
    slots.leave(b)
    slots.sit(response("d"))
    assert names(slots) == ["a", "d", "c"]
    assert slots.free == 1


def test_the_last_move_into_holes() -> None:
    slots, (a, _, c, d, e) = seated(8, *"abcde")
    for gone in (a, c, d):
        slots.leave(gone)
    assert slots.close_up() == [(4, 0)]
    assert names(slots) == ["e", "b"]
    assert e.slot == 0
    slots.leave(e)
    slots.leave(slots.seated[1])  # type: ignore[arg-type]
    assert slots.close_up() == []
    assert names(slots) == []


def test_a_batch_sits_when_all_slots_are_empty_and_others_wait_behind_it() -> None:
    queue, members = Queue(), [response("m0"), response("m1")]
    for entry in (response("a"), Batch(members), response("b")):
        queue.put(entry)
    assert len(queue) == 4
    assert queue.next(slots_empty=True) is not None
    assert queue.next(slots_empty=False) is None
    assert [queue.next(slots_empty=empty) for empty in (True, False)] == members
    assert queue.next(slots_empty=True) is None
    for member in members:
        member.end("length")
    after = queue.next(slots_empty=True)
    assert after is not None
    assert after.request.id == "b"


def test_while_it_drains_only_a_batch_that_sits_goes_on() -> None:
    queue, members = Queue(), [response("m0"), response("m1")]
    queue.put(Batch(members))
    queue.put(response("b"))
    assert queue.next(slots_empty=True, begun_only=True) is None
    assert queue.next(slots_empty=True) is members[0]
    assert queue.next(slots_empty=False, begun_only=True) is members[1]
    assert queue.next(slots_empty=False, begun_only=True) is None


def test_who_was_aborted_while_waiting_never_sits() -> None:
    queue, gone, member = Queue(), response("gone"), response("member")
    gone.end("abort")
    member.end("abort")
    for entry in (gone, Batch([member]), Batch([]), response("left")):
        queue.put(entry)
    found = queue.next(slots_empty=True)
    assert found is not None
    assert found.request.id == "left"


def test_spans_of_one_version_become_one() -> None:
    assert join_spans([(3, 0, 5)], [(3, 5, 8), (4, 8, 8), (4, 8, 9)]) == [(3, 0, 8), (4, 8, 9)]
    assert oldest_version(((3, 0, 8), (4, 8, 9))) == 3
    assert oldest_version(()) is None


def text_of(tokens: Sequence[int]) -> str:
    return "".join("abcdef"[token] for token in tokens)


def test_a_stop_string_is_found_where_it_is_completed() -> None:
    assert completing(text_of, [0, 1], [2, 3, 4], ["bcd"]) == 2
    assert completing(text_of, [0, 1], [2, 3, 4], ["x", "e", "c"]) == 1
    assert completing(text_of, [0, 1], [2, 3, 4], ["x"]) is None
    assert tail_tokens(["ab", "abc"]) == 4 * 3 + 8


def test_the_budget_says_how_many_slots_there_are() -> None:
    assert slots_within(1000, length=10, token_bytes=20, rows=64) == 5
    assert slots_within(1000, length=10, token_bytes=20, rows=3) == 3
    with pytest.raises(ConfigError, match="needs 2000 bytes of key-value cache and the budget is 1000"):
        slots_within(1000, length=100, token_bytes=20, rows=64)
