"""Two GPUs that keep a model together through NCCL, beside one that has all of it."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.work import ForwardWork, SampleWork, TrainWork
from asyncrl.engine.testing.conformance.sharded_rank import VOCABULARY, Found, Task
from asyncrl.trainers.backends.torch_settings import TorchSettings
from asyncrl.trainers.loss.objective import Clip
from asyncrl.trainers.reducer import MeetingPoint

PROGRAM = "asyncrl.engine.testing.conformance.sharded_rank"
SETTINGS = TorchSettings(1.0, Clip(low=0.2, high=0.3, dual=3.0), (0.9, 0.95), 0.0, 1.0)
LENGTHS = (15, 9, 12, 8)
STEPS = 2


def task(ranks: int, **more: Any) -> Task:
    """Four samples per step, each a micro-batch of its own, dealt to the ranks in turn."""
    draw = torch.Generator().manual_seed(1)
    works: list[list[ForwardWork | TrainWork]] = [[] for _ in range(ranks)]
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(1, STEPS + 1):
        keys = sample_keys(0, step, len(LENGTHS))
        samples = {}
        for i, (key, length) in enumerate(zip(keys, LENGTHS, strict=True)):
            ids = torch.randint(1, VOCABULARY, (length,), generator=draw, dtype=torch.int32)
            rows[key] = ids, -2.6 + 0.4 * torch.randn(length - 2, generator=draw)
            samples[key] = SampleWork(key, 2, length - 2, (-1.0) ** i * (1 + i))
        total = sum(sample.response_tokens for sample in samples.values())
        for rank in range(ranks):
            mine = keys[rank::ranks]
            batches = tuple(MicroBatch((key,), len(rows[key][0])) for key in mine)
            own = {key: samples[key] for key in mine}
            works[rank].append(ForwardWork(step, batches, own, total, write=True))
            works[rank].append(TrainWork(step, batches, own, total))
    options = {"dtype": torch.float32, "device": "cuda", "settings": SETTINGS, **more}
    return Task(ranks=ranks, shard_ranks=ranks, works=works, rows=rows, **options)


def found(given: Task, folder: Path) -> list[Found]:
    folder.mkdir()
    (folder / "task").write_bytes(pickle.dumps(given))
    point, files = MeetingPoint(), [folder / f"found-{rank}" for rank in range(given.ranks)]
    members = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(rank), point.address, str(folder / "task"), str(file)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    for member in members:
        _, err = member.communicate(timeout=200)
        assert member.returncode == 0, err
    return [pickle.loads(file.read_bytes()) for file in files]


def gradient(ranks: Sequence[Found], update: int) -> torch.Tensor:
    """Join what each rank has of the gradients: rows of each weight, in the order of the ranks."""
    names = ranks[0].gradients[update]
    return torch.cat([torch.cat([one.gradients[update][name][2] for one in ranks]).flatten() for name in names])


@pytest.mark.gpus(2)
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-5),
        ({"packed": True, "low_weights": True}, 0.05),
        ({"low_weights": True, "offload": True, "recompute": True}, 0.05),
        ({"packed": True, "low_weights": True, "fused": True}, 0.05),
    ],
    ids=["float32", "bf16_weights-packed", "off-load", "compiled"],
)
def test_two_gpus_train_as_one_does(tmp_path: Path, options: dict[str, Any], bound: float) -> None:
    """Log-probabilities, gradients and the weights that rank 0 publishes; each GPU keeps half of them."""
    compute = torch.bfloat16 if options.get("low_weights") else None
    more = {"settings": replace(SETTINGS, **options), "compute_dtype": compute}
    (one,), two = found(task(1, **more), tmp_path / "one"), found(task(2, **more), tmp_path / "two")
    for key, value in one.logprobs.items():
        torch.testing.assert_close(two[0].logprobs[key], value, rtol=0, atol=bound)
    for update in range(STEPS):
        right = gradient([one], update)
        assert float((gradient(two, update) - right).norm() / right.norm()) < bound * 4
    for name, value in one.weights.items():
        torch.testing.assert_close(two[0].weights[name].float(), value.float(), rtol=0, atol=0.05)
    assert two[0].digest == two[1].digest
    assert two[0].parts < two[0].whole
