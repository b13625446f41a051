"""The PyTorch backend on a GPU, padded and packed, against the same in float64 on the CPU."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

LENGTHS = (90, 3, 257, 64, 1024, 31)
EVEN = (1030, 1024, 1025)
PROMPT = 2


def llama() -> Any:
    """Grouped-query heads of size 64, weights in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=64,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return LlamaForCausalLM(shape).double().eval()


def backend(
    model: Any, *, packed: bool, compute_dtype: torch.dtype | None = None, align: int = 1, fused: bool = False
) -> TorchBackend:
    clip = Clip(low=0.2, high=0.3, dual=3.0)
    chunk = None if align == 1 else 100
    settings = TorchSettings(1.0, clip, (0.9, 0.95), 0.0, 1.0, packed=packed, align=align, chunk=chunk, fused=fused)
    return TorchBackend(model, settings, pad_id=0, compute_dtype=compute_dtype)


def rows(logprobs: list[torch.Tensor], lengths: Sequence[int] = LENGTHS) -> Rows:
    draw = torch.Generator().manual_seed(1)
    return Rows(
        tokens=[torch.randint(1, 64, (length,), generator=draw) for length in lengths],
        logprobs=logprobs,
        prompt_tokens=[PROMPT] * len(lengths),
        advantages=[(-1.0) ** i * (1 + i) for i in range(len(lengths))],
        withheld=[0] * len(lengths),
        filler=False,
    )


def behaviour(exact: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities of a policy a little off, so that ratios are clipped here and there."""
    draw = torch.Generator().manual_seed(2)
    return [values + 0.1 * torch.randn(values.shape, generator=draw, dtype=values.dtype) for values in exact]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("lengths", [LENGTHS, EVEN], ids=["uneven", "even"])
def test_logprobs_loss_and_gradient_are_those_of_float64(
    packed: bool, dtype: torch.dtype, bound: float, align: int, lengths: Sequence[int]
) -> None:
    """D10 and invariant 7 on a GPU, with one chunk of logits and many; packed rows in bfloat16 have a kernel, and stay
    rows if samples are as long as each other.
    """
    total = sum(lengths) - PROMPT * len(lengths)
    reference = backend(llama(), packed=False)
    exact = reference.logprobs(rows([], lengths))
    sampled = behaviour(exact)
    right = reference.accumulate(rows(sampled, lengths), total).read()
    right_gradient = reference.gradients()

    model = copy.deepcopy(llama()).float().to("cuda")
    on_gpu = backend(model, packed=packed, compute_dtype=dtype, align=align)
    found = on_gpu.logprobs(rows([], lengths))
    torch.testing.assert_close(torch.cat(found).double(), torch.cat(exact), rtol=0, atol=bound)
    sums = on_gpu.accumulate(rows([values.float() for values in sampled], lengths), total).read()
    gradient = on_gpu.gradients().double().cpu()
    assert sums.tokens == right.tokens == total
    assert sums.loss == pytest.approx(right.loss, abs=bound * 10)
    assert float((gradient - right_gradient).norm() / right_gradient.norm()) < bound * 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_layers_and_loss_give_the_numbers_of_float64_for_all_lengths(packed: bool) -> None:
    """In bfloat16, so that packed rows go through the kernel; other lengths compile nothing new."""
    torch.compiler.reset()
    counters.clear()
    exact = backend(llama(), packed=False)
    on_gpu = backend(copy.deepcopy(llama()).float().to("cuda"), packed=packed, compute_dtype=torch.bfloat16, fused=True)
    graphs = []
    for count in (2, 6, 4):
        all_rows = rows([])
        some = replace(
            all_rows,
            tokens=all_rows.tokens[:count],
            prompt_tokens=[PROMPT] * count,
            advantages=all_rows.advantages[:count],
            withheld=[0] * count,
        )
        right = exact.logprobs(some)
        found = on_gpu.logprobs(some)
        torch.testing.assert_close(torch.cat(found).double(), torch.cat(right), rtol=0, atol=0.05)
        sampled = behaviour(right)
        exact.accumulate(replace(some, logprobs=sampled), 100)
        on_gpu.accumulate(replace(some, logprobs=[values.float() for values in sampled]), 100)
        expected, gradient = exact.gradients(), on_gpu.gradients().double().cpu()
        assert torch.linalg.vector_norm(gradient - expected) <= 0.05 * torch.linalg.vector_norm(expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3
    assert counters["graph_break"] == {}
