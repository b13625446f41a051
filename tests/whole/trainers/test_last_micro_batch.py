"""Which micro-batch a backend is told to be the last before an update."""

from typing import Any

import torch

from asyncrl.trainers.backends.base import Rows, StepSums
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip


def test_only_the_last_micro_batch_of_each_update_is_the_last(causal_mean: Any, varied: Any, run_batch: Any) -> None:
    """With it sharded ranks sum gradients: with all of them they would send as much for each micro-batch."""
    told: list[str] = []

    class Telling(TorchBackend):
        def accumulate(self, rows: Rows, total_tokens: int) -> StepSums:
            told.append("last" if rows.last else "one of several")
            return super().accumulate(rows, total_tokens)

        def apply(self, gradients: torch.Tensor, *, learning_rate: float) -> float:
            told.append("update")
            return super().apply(gradients, learning_rate=learning_rate)

    def make(model: Any, **options: Any) -> TorchBackend:
        settings = TorchSettings(1.0, Clip(0.2, 0.3, 3.0), (0.9, 0.95), 0.0, 1.0, **options)
        return Telling(model, settings, pad_id=0)

    run_batch(causal_mean, varied, ranks=1, make=make, updates_per_batch=2, micro_batch_tokens=12, forward_tokens=20)
    updates = " ".join(told).split("update")
    assert updates[-1] == ""
    assert len(updates) == 3
    for update in updates[:2]:
        assert update.count("one of several") > 1
        assert update.count("last") == 1
        assert update.strip().endswith("last")
