"""The learning rate by step, and that a rank's updates have it."""

from typing import Any

import pytest
import torch

from asyncrl.configs import load, parse_set
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.work import TrainWork, Update
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.rank import RankSettings, TrainerRank
from asyncrl.trainers.reducer import Alone
from asyncrl.trainers.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(), [1, 1, 1]),
        (Schedule("constant", 4), [0.25, 0.5, 0.75, 1, 1]),
        (Schedule("linear", 2, 5), [0.5, 1, 0.75, 0.5, 0.25, 0.25]),
        (Schedule("linear", 0, 4), [1, 0.75, 0.5, 0.25, 0.25]),
        (Schedule("cosine", 1, 4), [1, 0.8535533905932737, 0.5, 0.14644660940672627, 0.14644660940672627]),
    ],
)
def test_it_rises_by_equal_parts_and_falls_until_the_last_step(schedule: Schedule, factors: list[float]) -> None:
    """No step is lost to a rate of 0, and none after the last has another."""
    assert [schedule.factor(step) for step in range(1, len(factors) + 1)] == pytest.approx(factors, abs=1e-12)


def test_it_ends_with_the_run_if_nothing_else_is_said() -> None:
    options = [parse_set("run.steps=5"), parse_set("trainer.lr_schedule=linear")]
    assert Schedule.of(load("default", options).config) == Schedule("linear", 0, 5)


class Rates:
    """A backend that keeps the learning rates of its updates."""

    sums_gradients = False

    def __init__(self) -> None:
        self.seen: list[float] = []

    def gradients(self) -> torch.Tensor:
        return torch.zeros(1)

    def apply(self, _: torch.Tensor, *, learning_rate: float) -> float:
        self.seen.append(learning_rate)
        return 0.0


def test_all_updates_of_a_step_have_its_rate_and_the_result_says_it() -> None:
    backend: Any = Rates()

    async def main() -> list[float]:
        plane = LocalPlane()
        await plane.register(Partition("train", 2, COLUMNS, ("trainer",)))
        rank = TrainerRank(
            RankSettings(0, 1, "train", learning_rate=0.1, schedule=Schedule("linear", 2, 3)),
            backend=backend,
            plane=plane,
            reducer=Alone(),
            transport=InProcess(),
            blocking=in_place,
        )
        updates = (Update(0, 1), Update(0, 1))
        return [(await rank.train(TrainWork(step, (), {}, 2, updates=updates))).learning_rate for step in (1, 2, 3)]

    assert run_virtual(main) == pytest.approx([0.05, 0.1, 0.05])
    assert backend.seen == pytest.approx([0.05, 0.05, 0.1, 0.1, 0.05, 0.05])
