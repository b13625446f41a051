"""An answer: its tokens, how far it may go, where it ends, and of which versions it is."""

import pytest

from asyncrl.collectors.engines.answer import Answer
from asyncrl.collectors.engines.base import Request, Result, Sampling


def text(tokens: object) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)  # type: ignore[attr-defined]


def request(tokens: int = 8, done: Result | None = None, **sampling: object) -> Request:
    return Request("r", (1, 2), Sampling(tokens, **sampling), seed=5, done=done)  # type: ignore[arg-type]


def test_versions_that_come_last_tile_the_tokens() -> None:
    answer = Answer(request())
    for token in range(4):
        answer.take([token], [-1.0])
    assert answer.untold == 4
    answer.take_spans(((3, 0, 1), (4, 1, 4)))
    assert answer.result("length").spans == ((3, 0, 1), (4, 1, 4))


def test_a_token_without_a_version_is_an_error() -> None:
    answer = Answer(request())
    answer.take([1, 2], [-1.0, -1.0])
    answer.take_spans(((3, 0, 1),))
    with pytest.raises(ValueError, match="version of 1 of 2"):
        answer.result("length")


def test_a_token_without_a_logprob_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 tokens and 1 log"):
        Answer(request()).take([1, 2], [-1.0])


def test_a_partial_goes_on_behind_its_tokens_with_other_random_numbers() -> None:
    done = Result((7, 8), (-0.5, -0.25), ((1, 0, 1), (2, 1, 2)), "abort")
    answer = Answer(request(5, done))
    assert (answer.prompt_ids, answer.left) == ([1, 2, 7, 8], 3)
    assert answer.seed != Answer(request()).seed
    answer.take([9], [-1.0])
    answer.take_spans(((2, 0, 1),))
    assert answer.result("abort") == Result((7, 8, 9), (-0.5, -0.25, -1.0), ((1, 0, 1), (2, 1, 3)), "abort")


def test_the_token_that_completes_a_stop_string_is_the_last_also_across_an_abort() -> None:
    done = Result((2,), (-1.0,), ((0, 0, 1),), "abort")
    answer = Answer(request(8, done, stop_strings=("cde",)), text)
    answer.take([3, 4, 5, 6], [-1.0] * 4)
    answer.take_spans(((0, 0, 4),))
    assert answer.ended
    assert answer.take([7], [-1.0]) is None
    assert answer.result("stop") == Result((2, 3, 4), (-1.0,) * 3, ((0, 0, 3),), "stop")


def test_a_partial_that_had_ended_by_itself_does_not_go_on() -> None:
    done = Result((2, 3), (-1.0, -1.0), ((0, 0, 2),), "stop")
    assert Answer(request(8, done, stop_ids=(3,))).ended
    assert not Answer(request(8, done, stop_ids=(4,))).ended


def test_what_does_not_fit_or_cannot_be_looked_for_is_said_with_numbers() -> None:
    assert "2 prompt tokens and 9 new ones" in Answer(request(9)).fault(10)
    assert "no tokens" in Answer(Request("r", (), Sampling(1), 0)).fault(10)
    assert "`text`" in Answer(request(2, stop_strings=("a",))).fault(10)
    assert Answer(request(8)).fault(10) == ""
