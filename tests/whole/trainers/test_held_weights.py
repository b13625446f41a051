"""A rank holds a copy of one whole version to save, and none of what lies between two versions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import AsyncRLError, VersionError
from asyncrl.engine.model.folder import Note
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.work import TrainWork, Update
from asyncrl.engine.weights.base import InProcess, State
from asyncrl.trainers.rank import RankSettings, TrainerRank

NOTE = Note(version=1, step=1, mean_reward=None, reward_window=1, config="0")
EXAMPLES = [([1, 2, 3, 1], 2)]


class Written:
    """A writer that keeps what it was given."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def hold_adapter(self) -> None:
        """There is none."""

    def write(self, state: State, folders: Sequence[Path], note: Note) -> None:
        self.states.append(state)


class Sums:
    """A reducer that adds nothing, whose n-th sum is given to `change`."""

    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self._change = change
        self._sums = 0

    async def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._sums += 1
        return self._change(self._sums, values)


def work(step: int, updates: int) -> TrainWork:
    parts = tuple(Update(0, 1) for _ in range(updates))
    return TrainWork(step=step, micro_batches=(), samples={}, total_tokens=updates, updates=parts)


async def rank_of(backend: Any, writer: Written, change: Any = lambda _, values: values) -> TrainerRank:
    plane = LocalPlane()
    await plane.register(Partition("train", 2, COLUMNS, ("trainer",)))
    return TrainerRank(
        RankSettings(0, 1, "train", learning_rate=0.1),
        backend=backend,
        plane=plane,
        reducer=Sums(change),
        transport=InProcess(),
        blocking=in_place,
        writer=writer,  # type: ignore[arg-type]
    )


def test_what_is_saved_is_the_version_that_was_held_and_not_a_later_one(causal_mean: Any, make_backend: Any) -> None:
    async def main() -> None:
        writer, backend = Written(), make_backend(causal_mean)
        rank = await rank_of(backend, writer, lambda _, values: values + 1)
        with pytest.raises(AsyncRLError, match="holds no weights"):
            await rank.save_held(["model"], NOTE)
        await rank.warm_up(EXAMPLES, steps=2, batch=1, learning_rate=0.1)
        assert await rank.hold_weights() == 0
        await rank.train(work(1, updates=2))
        assert await rank.hold_weights() == 1
        held = {name: value.clone() for name, value in backend.state().items()}
        await rank.train(work(2, updates=1))
        await rank.save_held(["model"], NOTE)
        (saved,) = writer.states
        assert all(torch.equal(saved[name], value) for name, value in held.items())
        assert not torch.equal(saved["out.weight"], backend.state()["out.weight"])

    run_virtual(main)


def test_weights_between_two_updates_of_a_version_are_not_saved(causal_mean: Any, make_backend: Any) -> None:
    """A step that fails at its second update; one that fails at its first, with the weights as they were."""

    def fails_at(bad: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
        return lambda number, values: values / (0.0 if number == bad else 1.0) + (1.0 if number < bad else torch.inf)

    async def main() -> None:
        rank = await rank_of(make_backend(causal_mean), Written(), fails_at(3))
        await rank.train(work(1, updates=1))
        with pytest.raises(FloatingPointError):
            await rank.train(work(2, updates=2))
        with pytest.raises(VersionError, match="rank0 stopped between the updates of one version"):
            await rank.hold_weights()
        with pytest.raises(VersionError, match="rank0 stopped between the updates of one version"):
            await rank.hold_state()
        rank = await rank_of(make_backend(causal_mean), Written(), fails_at(2))
        await rank.train(work(1, updates=1))
        with pytest.raises(FloatingPointError):
            await rank.train(work(2, updates=2))
        assert await rank.hold_weights() == 1

    run_virtual(main)


def test_a_copy_waits_for_an_update_that_is_being_applied(causal_mean: Any, make_backend: Any) -> None:
    """Weights of two versions would be mixed: the copy is taken in one thread, the update in another."""

    async def main() -> None:
        backend, writer = make_backend(causal_mean), Written()
        rank = await rank_of(backend, writer, lambda _, values: values + 1)
        at: list[str] = []

        async def slow(call: Callable[[], Any]) -> Any:
            at.append("begin")
            await anyio.sleep(1.0)
            result = call()
            at.append("end")
            return result

        rank._blocking = slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rank.train, work(1, updates=1))
            await anyio.sleep(1.5)  # The gradients are there; the update is being applied.
            assert await rank.hold_weights() == 1
        assert at == ["begin", "end"] * 3

    run_virtual(main)
