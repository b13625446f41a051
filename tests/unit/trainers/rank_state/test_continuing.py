"""A rank that is saved, and loaded into a fresh backend, continues bit for bit."""

import random
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, REFERENCE_LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import SampleWork
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Meeting

SAMPLES = [(tuple(2 + (i * j) % 9 for j in range(1, 5 + i % 3)), (-1.0) ** i * (0.3 + 0.2 * i)) for i in range(8)]


class Awkward(nn.Module):
    """Float32, with tied weights, a frozen one, a buffer that training changes, and noise of three generators."""

    def __init__(self, noise: float = 0.05) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.hidden, self.out = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12)
        self.out.weight = self.embed.weight
        self.hidden.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._noise = noise

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> Any:
        self.calls += 1
        mean = self.embed(input_ids).cumsum(1) / torch.arange(1, input_ids.shape[1] + 1).unsqueeze(-1)
        noise = torch.rand(6) + random.gauss() + float(np.random.standard_normal())
        return SimpleNamespace(logits=self.out(torch.tanh(self.hidden(mean) + self._noise * noise)))


class Replicas:
    """Ranks that train the same batch at each step: two updates, a reference, weight decay and a proximal policy."""

    def __init__(self, make: Any, ranks: int = 1, *, noise: float = 0.05, updates: int = 2) -> None:
        self._config = simulated_config(
            trainer__updates_per_batch=updates,
            trainer__reference_kl=0.1,
            trainer__micro_batch_tokens=16,
        )
        meeting, self._plane, self._registered = Meeting(ranks, 60.0), LocalPlane(), False
        self.models = [Awkward(noise) for _ in range(ranks)]
        self.backends: list[TorchBackend] = [make(model, weight_decay=0.1, reference_kl=0.1) for model in self.models]
        for model in self.models:  # The policy is no longer its reference.
            with torch.no_grad():
                model.embed.weight.add_(0.25)
        self.ranks = [
            TrainerRank(
                RankSettings(i, ranks, "train", learning_rate=0.03),
                backend=backend,
                plane=self._plane,
                reducer=meeting.member(i),
                transport=InProcess(),
                blocking=in_place,
            )
            for i, backend in enumerate(self.backends)
        ]

    async def steps(self, *numbers: int) -> None:
        if not self._registered:
            later = (TRAINER_LOGPROBS, REFERENCE_LOGPROBS)
            await self._plane.register(Partition("train", len(SAMPLES), COLUMNS, ("trainer",), later=later))
            self._registered = True
        for step in numbers:
            keys = sample_keys(0, step, len(SAMPLES))
            tokens = [torch.tensor(ids, dtype=torch.int32) for ids, _ in SAMPLES]
            behaviour = [torch.full((len(ids) - 2,), -2.0) for ids, _ in SAMPLES]
            await self._plane.put(
                "train", GroupMeta(keys, {VERSION: 0, GROUP: step}), {TOKENS: tokens, LOGPROBS: behaviour}
            )
            await self._step(step, keys)

    async def _step(self, step: int, keys: Sequence[str]) -> None:
        lengths = {key: len(ids) for key, (ids, _) in zip(keys, SAMPLES, strict=True)}
        works = {key: SampleWork(key, 2, len(ids) - 2, value) for key, (ids, value) in zip(keys, SAMPLES, strict=True)}
        selection = Selection(samples=works, lengths=lengths, ages=dict.fromkeys(keys, 0), masks={}, reward_sum=0.0)
        stages = Stages(self._config, ranks=self.ranks, cost=None)  # type: ignore[arg-type]
        await stages.logprobs(selection, step=step, write=True)
        await stages.reference_logprobs(selection, step=step)
        await stages.train(stages.plan(selection), selection, step=step)

    def state(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.backends[rank].training_state().tensors.items()}


@contextmanager
def own_random(seed: int) -> Any:
    """Leave the generators of other tests alone."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not differ


def test_a_step_a_save_a_load_and_two_steps_are_three_steps(make_backend: Any, tmp_path: Path) -> None:
    async def main() -> None:
        with own_random(1):
            whole = Replicas(make_backend)
            await whole.steps(1, 2, 3)
            assert float(whole.state()["optimizer/step/hidden.weight"]) == 6  # Two updates per batch.
        with own_random(1):
            first = Replicas(make_backend)
            await first.steps(1)
            assert await first.ranks[0].hold_state() == 1
            await first.steps(2)  # Beside the save; nothing of it is saved.
            await first.ranks[0].save_state(str(tmp_path))
        with own_random(2):
            second = Replicas(make_backend)
            await second.ranks[0].load_state(str(tmp_path))
            assert await second.ranks[0].hold_weights() == 1
            await second.steps(2, 3)
            assert_equal(second.state(), whole.state())

    run_virtual(main)
