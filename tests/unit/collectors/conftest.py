"""A model with fixed logits, a gate around blocking calls, generators that run, and a tiny checkpoint."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.configs import load_config
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.model.causal_lm import build_model

EOS = 1
POISON = 31


class FixedLogits(nn.Module):
    """The same logits after every token; a prompt that holds POISON makes the forward pass raise."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.config = LlamaConfig(num_hidden_layers=1)
        self.batches: list[int] = []

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        ids = input_ids
        if (ids == POISON).any():
            raise RuntimeError("poisoned prompt")
        self.batches.append(ids.shape[0])
        return SimpleNamespace(logits=self.logits.expand(ids.shape[0], 1, -1))


class Gate:
    """An blocking that holds blocking calls until opened; `calls` have come so far."""

    def __init__(self) -> None:
        self.calls = 0
        self._open = anyio.Event()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open = anyio.Event()

    async def __call__(self, call: Callable[[], Any]) -> Any:
        self.calls += 1
        await self._open.wait()
        return call()


@asynccontextmanager
async def generating(
    model: Any,
    *,
    decode_samples: int = 256,
    alone: bool = False,
    blocking: Callable[[Callable[[], Any]], Awaitable[Any]] = in_place,
) -> AsyncIterator[TorchGenerator]:
    """Run a generator for the length of the context."""
    generator = TorchGenerator(
        model, eos_id=EOS, pad_id=0, decode_samples=decode_samples, alone=alone, blocking=blocking
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generator.run)
        yield generator
        tasks.cancel_scope.cancel()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def fixed_logits() -> Callable[[list[float]], FixedLogits]:
    return FixedLogits


@pytest.fixture
def make_gate() -> Callable[[], Gate]:
    return Gate


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[TorchGenerator]]:
    return generating


@pytest.fixture
def llama() -> Any:
    return build_model(
        load_config("default", {"model": {"hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 24}}).model,
        vocab_size=32,
        seed=2,
    )
