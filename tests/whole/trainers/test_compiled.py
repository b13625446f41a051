"""Layers and loss under torch.compile: the same numbers, one graph per kind of pass, whatever lengths come."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from asyncrl.configs import load_config
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.chosen import chosen_scores
from asyncrl.trainers.backends.torch_backend import TorchBackend

Make = Callable[..., TorchBackend]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def rows_of(lengths: list[int], prompt: int = 2) -> Rows:
    random = torch.Generator().manual_seed(sum(lengths))
    return Rows(
        [torch.randint(1, 12, (length,), generator=random) for length in lengths],
        [torch.full((length - prompt,), -2.5) for length in lengths],
        [prompt] * len(lengths),
        [(-1.0) ** i for i in range(len(lengths))],
        [0] * len(lengths),
        filler=False,
    )


@pytest.mark.timeout(300)
def test_compiled_layers_train_as_they_are_and_lengths_do_not_compile_anew(make_backend: Make) -> None:
    shape = load_config("default", {"model": {"hidden_size": 16, "layers": 3, "heads": 2, "intermediate_size": 24}})
    model = build_model(shape.model, vocab_size=12, seed=3)
    plain, fused = (make_backend(copy.deepcopy(model), packed=True, chunk=7, fused=on) for on in (False, True))
    graphs = []
    for lengths in ([9, 5], [12, 3, 4], [6, 6], [21, 5, 5, 4, 3]):
        rows = rows_of(lengths)
        expected, found = plain.accumulate(rows, 20).read(), fused.accumulate(rows, 20).read()
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        assert found.entropy == pytest.approx(expected.entropy, rel=1e-4)
        for one, other in zip(plain.logprobs(rows), fused.logprobs(rows), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(fused.gradients(), plain.gradients(), rtol=1e-3, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert counters["graph_break"] == {}
    # A layer with and without gradient, and the loss's two kernels: not one for each layer, nor for each length.
    assert graphs == [graphs[0]] * 4
    assert graphs[0] == 4


@pytest.mark.timeout(300)
def test_fused_kernels_read_logits_as_the_others_do() -> None:
    """With logits of minus infinity, which take no part; a temperature; and chunks that are computed again."""
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 7] = -torch.inf
    tokens = torch.arange(9)
    tokens[7] = 0
    found = []
    for fused in (False, True):
        inputs = logits.clone().requires_grad_()
        scores = chosen_scores(lambda some: some * 1.0, inputs, tokens, temperature=0.7, chunk=4, fused=fused)
        (scores.logprobs * torch.arange(9)).sum().backward()  # type: ignore[no-untyped-call]
        assert inputs.grad is not None
        found.append((scores.logprobs.detach(), scores.entropies, inputs.grad))
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
