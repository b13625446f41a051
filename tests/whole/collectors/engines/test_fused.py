"""Compiled decode steps: one program for every window, and the plain model where none can be made."""

from functools import partial
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from asyncrl.collectors.engines.base import Sampling
from asyncrl.collectors.engines.decoder import Decoder
from asyncrl.collectors.engines.fused import FusedModel
from asyncrl.collectors.engines.rows import Seat
from asyncrl.collectors.engines.settings import NativeSettings
from asyncrl.engine.testing.conformance.engine_trials import tiny_model

PROMPTS = [(5, 6, 7, 8), (9, 10, 11), (3, 4)]
STEPS = 20


def decoded(family: str, compiler: Any = None) -> tuple[list[list[int]], list[list[float]]]:
    """Return what two windows of a cache give: 64 positions, and 128."""
    settings = NativeSettings(len(PROMPTS), 128, 2**28, graphs=False, compiled=compiler is not None)
    decoder = Decoder(tiny_model(family, 0), settings, fuse=partial(FusedModel, compiler=compiler))
    decoder.fill(range(len(PROMPTS)), [prompt[:-1] for prompt in PROMPTS])
    decoder.seat([Seat(i, p[-1], len(p) - 1, 0, Sampling(80), i) for i, p in enumerate(PROMPTS)])
    first, second = (decoder.burst(len(PROMPTS), top, steps=STEPS, filtered=False).read() for top in (64, 100))
    tokens = [one + two for one, two in zip(first[0], second[0], strict=True)]
    return tokens, [one + two for one, two in zip(first[1], second[1], strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_one_program_serves_every_window_and_decodes_as_the_plain_model(family: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    # Inductor compiles for a minute here; what it is given to compile is the same.
    tokens, logprobs = decoded(family, partial(torch.compile, backend="eager", fullgraph=True))
    assert counters["stats"]["unique_graphs"] == 1
    plain_tokens, plain_logprobs = decoded(family)
    assert tokens == plain_tokens
    assert logprobs == [pytest.approx(row, abs=1e-5) for row in plain_logprobs]


def test_a_model_that_cannot_be_compiled_decodes_as_it_is_and_says_so() -> None:
    class Failing:
        def __init__(self, model: Any, *, dynamic: bool) -> None:
            pass

        def __call__(self, **inputs: Any) -> Any:
            raise TorchDynamoException("no compiler")

    with capture_logs() as logs:
        assert decoded("llama", Failing) == decoded("llama")
    assert [line["error"] for line in logs] == ["no compiler"]
