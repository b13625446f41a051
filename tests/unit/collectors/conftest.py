"""A collector at its desk, a model with fixed logits, a gate around blocking calls, and a tiny checkpoint."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.generators.torch_generator import TorchGenerator
from asyncrl.collectors.scoring import Scorer
from asyncrl.collectors.tasks import Task
from asyncrl.configs import load_config
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.model.causal_lm import build_model
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.message import Message, PutNotice
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask, FaultyPlane
from asyncrl.engine.weights.base import InProcess

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


@dataclass
class Desk:
    """A collector at work, and what it says."""

    collector: Collector
    plane: LocalPlane
    generator: Any
    messages: list[Message] = field(default_factory=list)

    async def hear(self, count: int) -> list[Message]:
        """Return the first `count` messages."""
        while len(self.messages) < count:
            numbered = await self.collector.events(len(self.messages), 1e6)
            self.messages += [message for _, message in numbered]
        return self.messages


def work_at_desk(
    work: Callable[[Desk], Any],
    *,
    task: Task | None = None,
    generator: Any = None,
    before_put: Callable[[int], Any] | None = None,
    scorer: Scorer | None = None,
    taggers: dict[str, Any] | None = None,
    put_timeout_s: float = 30.0,
    group_timeout_s: float = 60.0,
    queue_timeout_s: float = 300.0,
    oversample: int = 0,
    reward_on_failure: float | None = None,
) -> Any:
    """Run `work` beside a collector, in virtual time."""

    async def main() -> Any:
        plane = LocalPlane(clock=virtual_clock)
        await plane.register(Partition("train", 4, (*COLUMNS, *(task.extras if task else ())), ("trainer",)))
        used = generator or FakeGenerator()
        collector = Collector(
            "collector0",
            CollectorSettings(
                "train", 0.7, 5, queue_timeout_s, group_timeout_s, put_timeout_s, oversample, reward_on_failure
            ),
            generator=used,
            scorer=scorer or in_place_scorer(task or FakeTask()),
            tokenizer=CharTokenizer(),
            plane=FaultyPlane(plane, {"put": before_put} if before_put else {}),
            transport=InProcess(),
            taggers=taggers,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            result = await work(Desk(collector, plane, used))
            tasks.cancel_scope.cancel()
        return result

    return run_virtual(main)


def grant_of(group: int, *, seed: int = 3) -> Grant:
    return Grant(group, Prompt(group % 4, f"{group % 4}>", str(group % 4), "fake"), 4, seed)


@pytest.fixture
def at_desk() -> Callable[..., Any]:
    """Run work beside a collector, in virtual time; keywords are parts and limits of the collector."""
    return work_at_desk


@pytest.fixture
def grant() -> Callable[..., Grant]:
    """Make the grant of a group of four samples, by its number."""
    return grant_of


@pytest.fixture
def one_group() -> Callable[[Desk], Any]:
    """Have a collector make one group, and return it as it was put."""
    return made_at


async def made_at(desk: Desk) -> GroupMeta:
    await desk.collector.grant([grant_of(0)])
    (message,) = await desk.hear(1)
    assert isinstance(message, PutNotice)
    return message.group
