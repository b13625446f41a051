"""Outcomes on their way from the process that scores: whole, and never code."""

import math
import pickle

import msgspec
import pytest
import torch

from asyncrl.collectors.outcome import SampleFailure
from asyncrl.collectors.score_answers import decode, encode
from asyncrl.collectors.tasks import Reward


def test_an_outcome_comes_back_as_it_was() -> None:
    shared = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    reward = Reward(0.1, {"format": math.inf}, {"pixels": shared, "turned": shared.t()})
    failure = SampleFailure("score_error", "half \ud800 a pair")
    found, nan, failed = decode(encode([reward, Reward(math.nan), failure]), 3)
    assert isinstance(found, Reward)
    assert (found.value, found.parts) == (0.1, {"format": math.inf})
    assert torch.equal(found.extras["turned"], shared.t())
    assert math.isnan(nan.value)  # type: ignore[union-attr]
    assert failed == SampleFailure("score_error", "half \\ud800 a pair")


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "answer", [pickle.dumps(_Code()), b"\xc1", msgspec.msgpack.encode([{"value": "1"}]), encode([Reward(1.0)])[:-1]]
)
def test_what_generated_code_writes_in_its_place_is_refused_and_never_unpickled(answer: bytes) -> None:
    with pytest.raises(ValueError, match="not an outcome"):
        decode(answer, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        decode(msgspec.msgpack.encode([{"extras": b"\0" * 20}]), 1)
    with pytest.raises(ValueError, match="answered 2 outcomes and was asked for 1"):
        decode(encode([Reward(1.0)] * 2), 1)
