"""What a rank asks of its backend from the first micro-batch of an update to the last."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from asyncrl.trainers.backends.base import DeviceSums, Rows, StepSums
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip

SOME, LAST, READ, UPDATE = "one of several", "last", "read", "update"


def test_only_the_last_micro_batch_of_each_update_is_the_last(causal_mean: Any, varied: Any, run_batch: Any) -> None:
    """With it sharded ranks sum gradients: with all of them they would send as much for each micro-batch."""
    told = updates_of(causal_mean, varied, run_batch)
    assert len(told) == 2
    for update in told:
        asked = [what for what in update if what != READ]
        assert asked.count(SOME) > 1
        assert asked[-1] == LAST
        assert asked.count(LAST) == 1


def test_sums_are_read_when_the_device_has_all_micro_batches(causal_mean: Any, varied: Any, run_batch: Any) -> None:
    """Reading waits for the device, which would then wait for the next micro-batch: with large ones 4 % of a step."""
    for update in updates_of(causal_mean, varied, run_batch):
        assert update[update.index(LAST) + 1 :] == [READ] * (len(update) // 2)


def updates_of(causal_mean: Any, varied: Any, run_batch: Any) -> list[list[str]]:
    """Return what a backend was asked for in each of two updates."""
    told: list[str] = []

    @dataclass(frozen=True, slots=True)
    class Telling(DeviceSums):
        def read(self) -> StepSums:
            told.append(READ)
            return DeviceSums.read(self)

    class Asked(TorchBackend):
        def accumulate(self, rows: Rows, total_tokens: int) -> DeviceSums:
            told.append(LAST if rows.last else SOME)
            return Telling(super().accumulate(rows, total_tokens).values)

        def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
            told.append(UPDATE)
            return super().apply(gradients, learning_rate=learning_rate)

    def make(model: Any, **options: Any) -> TorchBackend:
        settings = TorchSettings(1.0, Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.0, 1.0, **options)
        return Asked(model, settings, pad_id=0)

    run_batch(causal_mean, varied, ranks=1, make=make, updates_per_batch=2, micro_batch_tokens=12, forward_tokens=20)
    ends = [at for at, what in enumerate(told) if what == UPDATE]
    assert ends[-1] == len(told) - 1
    return [told[begin + 1 : end] for begin, end in pairwise([-1, *ends])]
