"""D12: what each token counts, for every normalisation, against sums written out; and packed rows equal padded."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.configs import load
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.normalisation import Normalisation, token_scales
from asyncrl.trainers.loss.objective import Clip


@pytest.mark.parametrize(
    ("how", "expected"),
    [("token_mean", 16 / 11), ("sequence_mean", 3.5), ("constant", 16 / (2 * 20))],
)
def test_d12_the_means_differ_as_they_should(how: Normalisation, expected: float) -> None:
    """D12: lengths 10 and 1, per-token losses 1 and 6."""
    tokens, losses = {"a": 10, "b": 1}, {"a": 1.0, "b": 6.0}
    scales = token_scales(tokens, how, constant=20)
    loss = sum(scales[key] * losses[key] * n for key, n in tokens.items()) / sum(tokens.values())
    assert loss == pytest.approx(expected, rel=1e-12)


def test_a_sample_without_trained_tokens_counts_nothing() -> None:
    assert token_scales({"a": 0, "b": 4}, "sequence_mean", constant=8)["a"] == 0.0


def _backend(packed: bool, model: Any) -> TorchBackend:
    settings = TorchSettings(0.7, Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.0, 1.0, packed=packed)
    return TorchBackend(copy.deepcopy(model), settings, pad_id=0)


def _rows(lengths: list[tuple[int, int]], *, filler: bool = False) -> Rows:
    rng = np.random.default_rng(1)
    return Rows(
        tokens=[torch.tensor(rng.integers(2, 32, prompt + n), dtype=torch.int32) for prompt, n in lengths],
        logprobs=[torch.tensor(-rng.random(n) * 3, dtype=torch.float64) for _, n in lengths],
        prompt_tokens=[prompt for prompt, _ in lengths],
        advantages=[float(a) for a in rng.normal(size=len(lengths))],
        withheld=[0] * len(lengths),
        filler=filler,
    )


@pytest.mark.parametrize("lengths", [[(2, 2)], [(1, 3), (4, 1), (2, 7)], [(3, 0), (2, 5)], [(2, 4)] * 3])
def test_packed_rows_give_the_logprobs_and_gradients_of_padded_rows(lengths: list[tuple[int, int]]) -> None:
    """D10: to float64's tolerance; no token attends or is predicted across a sample's border."""
    model = build_model(load().config.model, vocab_size=32, seed=0).double()
    padded, packed = _backend(False, model), _backend(True, model)
    rows = _rows(lengths)
    sums = [backend.accumulate(rows, 11).read() for backend in (padded, packed)]
    assert sums[0].loss == pytest.approx(sums[1].loss, abs=1e-12)
    assert sums[0].tokens == sums[1].tokens == sum(n for _, n in lengths)
    torch.testing.assert_close(padded.gradients(), packed.gradients(), rtol=0, atol=1e-12)
    for one, other in zip(padded.logprobs(rows), packed.logprobs(rows), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_packed_sample_does_not_feel_its_neighbours() -> None:
    model = build_model(load().config.model, vocab_size=32, seed=0).double()
    rows = _rows([(2, 3), (1, 6), (3, 2)])
    together = _backend(True, model).logprobs(rows)
    for i in range(3):
        alone = Rows(
            tokens=[rows.tokens[i]],
            logprobs=[rows.logprobs[i]],
            prompt_tokens=[rows.prompt_tokens[i]],
            advantages=[0.0],
            withheld=[0],
            filler=False,
        )
        torch.testing.assert_close(together[i], _backend(True, model).logprobs(alone)[0], rtol=0, atol=1e-12)
