"""A rank that is saved, and loaded into a fresh backend, continues bit for bit."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import CheckpointBroken, VersionError
from asyncrl.engine.lifecycle.parts import build_rank, build_run_model
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, REFERENCE_LOGPROBS, TOKENS, TRAINER_LOGPROBS
from asyncrl.engine.records.group import GROUP, VERSION
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import SampleWork
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.backends.base import TrainingState
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.links import Links
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.rank_state.keeper import StateKeeper
from asyncrl.trainers.rank_state.saved import SavedState
from asyncrl.trainers.reducer import Meeting

OFF = {"every_steps": None, "every_s": None, "at_end": False}
SAMPLES = [(tuple(2 + (i * j) % 9 for j in range(1, 5 + i % 3)), (-1.0) ** i * (0.3 + 0.2 * i)) for i in range(8)]


class Awkward(nn.Module):
    """Float32, with tied weights, a frozen one, a buffer that training changes, and noise of three generators."""

    calls: torch.Tensor

    def __init__(self, noise: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.hidden, self.out = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12)
        self.out.weight = self.embed.weight
        self.hidden.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._noise = noise

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> Any:
        self.calls.add_(1)
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
        self.drift(0.25)  # The policy is no longer its reference.
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

    def drift(self, much: float) -> None:
        """Change the policy alone."""
        for model in self.models:
            with torch.no_grad():
                model.embed.weight.add_(much)

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
        stages = Stages(self._config, ranks=self.ranks, cost=None)
        await stages.logprobs(selection, step=step, write=True)
        await stages.reference_logprobs(selection, step=step)
        await stages.train(stages.plan(selection), selection, step=step)

    def state(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.backends[rank].training_state().saved.items()}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the three generators, and leave them to other tests as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def assert_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def strangers(make: Any, ranks: int = 1, **options: Any) -> Replicas:
    """Ranks of a run that was not saved: other weights, another reference."""
    replicas = Replicas(make, ranks, **options)
    replicas.drift(1.0)
    for backend in replicas.backends:
        backend.freeze_reference()
    return replicas


def test_a_step_a_save_a_load_and_two_steps_are_three_steps(make_backend: Any, tmp_path: Path) -> None:
    """Bit for bit: weights, moments, step counts, reference, buffers and all three generators' noise."""

    async def main() -> None:
        with seeded(1):
            whole = Replicas(make_backend)
            await whole.steps(1, 2, 3)
            assert float(whole.state()["optimizer/step/hidden.weight"]) == 6  # Two updates per batch.
        with seeded(1):
            first = Replicas(make_backend)
            await first.steps(1)
            assert await first.ranks[0].hold_state() == 1
            await first.steps(2)  # Nothing of this step is saved.
            await first.ranks[0].save_state(str(tmp_path))
        with seeded(2):
            second = strangers(make_backend)
            await second.ranks[0].load_state(str(tmp_path))
            assert await second.ranks[0].hold_weights() == 1
            await second.steps(2, 3)
            assert_equal(second.state(), whole.state())

    run_virtual(main)


def test_a_state_before_the_first_update_has_moments_of_zero(make_backend: Any, tmp_path: Path) -> None:
    """And a backend that has others loses them."""

    async def main() -> None:
        with seeded(1):
            first, second = Replicas(make_backend), strangers(make_backend)
            await first.ranks[0].hold_state()
            await first.ranks[0].save_state(str(tmp_path))
            await second.steps(1)
            await second.ranks[0].load_state(str(tmp_path))
            assert_equal(second.state(), first.state())
            moments = [value for name, value in second.state().items() if name.startswith("optimizer/")]
            assert moments
            assert not any(value.any() for value in moments)

    run_virtual(main)


def test_a_state_without_moments_is_one_before_the_first_update(make_backend: Any, tmp_path: Path) -> None:
    """As Megatron writes it."""
    backend, other = (Replicas(make_backend).backends[0] for _ in range(2))

    class Bare:
        def training_state(self) -> TrainingState:
            state = backend.training_state()
            kept = {name: value for name, value in state.tensors.items() if not name.startswith("optimizer/")}
            return replace(state, tensors=kept)

        def load_training_state(self, saved: SavedState) -> None: ...

    keeper = StateKeeper(0, 1)
    keeper.hold(Bare(), 0)
    keeper.save(tmp_path)
    for value in other.training_state().tensors.values():
        value.detach().fill_(1)
    StateKeeper(0, 1).load(tmp_path, other)
    assert_equal(other.training_state().saved, backend.training_state().saved)


@pytest.mark.parametrize(
    ("changed", "reserved"), [({}, True), ({"every_steps": 5, "at_end": False}, True), (OFF, False)]
)
def test_a_rank_of_a_run_with_checkpoints_takes_their_memory_at_its_start(
    changed: Mapping[str, Any], reserved: bool
) -> None:
    """For weights and moments; without it the first checkpoint's step waits for the memory."""
    config = simulated_config(trainer__ranks=1, **{f"checkpoint__{name}": value for name, value in changed.items()})
    rank = build_rank(
        config,
        0,
        model=build_run_model(config),
        plane=LocalPlane(),
        links=Links(),
        transport=InProcess(),
        blocking=in_place,
    )
    state = rank._backend.training_state().tensors
    assert any(name.startswith("optimizer/exp_avg/") for name in state)
    assert set(rank._keeper._copy._buffers) == (set(state) if reserved else set())


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (2, 3)])
def test_a_state_is_loaded_at_another_number_of_ranks(
    make_backend: Any, tmp_path: Path, saved: int, loaded: int
) -> None:
    """The states are equal; the next step's gradients are equal up to the order of sums over ranks."""

    async def main() -> None:
        first = Replicas(make_backend, saved, noise=0.0, updates=1)
        await first.steps(1)
        for rank in first.ranks:
            assert await rank.hold_state() == 1
            await rank.save_state(str(tmp_path))
        second = strangers(make_backend, loaded, noise=0.0, updates=1)
        for rank in second.ranks:
            await rank.load_state(str(tmp_path))
        without = {name for name in first.state() if name.endswith("/calls")}  # Forward passes of a rank.
        for i in range(loaded):
            assert_equal(second.state(i), first.state())
        await first.steps(2)
        await second.steps(2)
        expected = first.state()
        for i in range(loaded):
            for name, value in second.state(i).items():
                if name not in without:
                    torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7, msg=name)

    run_virtual(main)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # Replicas are equal: rank 0 alone wrote tensors.


def test_a_rank_that_failed_to_load_has_no_version(make_backend: Any, tmp_path: Path) -> None:
    async def main() -> None:
        (rank,) = Replicas(make_backend).ranks
        with pytest.raises(CheckpointBroken, match=r"rank-00000\.json is missing"):
            await rank.load_state(str(tmp_path))
        with pytest.raises(VersionError, match="rank0"):
            await rank.hold_state()

    run_virtual(main)


def test_a_state_of_other_options_is_refused(make_backend: Any, tmp_path: Path) -> None:
    async def main() -> None:
        (rank,) = Replicas(make_backend).ranks
        await rank.hold_state()
        await rank.save_state(str(tmp_path))

    run_virtual(main)
    without_reference = make_backend(Awkward(0.0), reference_kl=0.0)
    with pytest.raises(CheckpointBroken, match="has unknown tensors: reference/calls, reference/embed"):
        without_reference.load_training_state(SavedState(tmp_path))


def test_a_hold_waits_for_the_save_under_way_and_an_update_for_the_hold(make_backend: Any, tmp_path: Path) -> None:
    """Otherwise a save would write what the next hold copies into its buffers, or two versions would be mixed."""

    async def main() -> None:
        replicas = Replicas(make_backend)
        (rank,) = replicas.ranks
        await rank.hold_state()
        at: list[str] = []

        async def slow(call: Callable[[], Any]) -> Any:
            at.append("begin")
            await anyio.sleep(1.0)
            result = call()
            at.append("end")
            return result

        rank._blocking = slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rank.save_state, str(tmp_path))
            await anyio.sleep(0.5)
            await rank.hold_state()
            assert at == ["begin", "end"] * 2
            tasks.start_soon(rank._update, 0.1, 1)  # Its gradients take a second.
            await anyio.sleep(0.5)
            assert await rank.hold_state() == 0
        assert at[-2:] == ["begin", "end"]
        rank._blocking = in_place
        assert await rank.hold_state() == 1

    run_virtual(main)
