"""Trainer ranks in processes of their own, on threads, as in a run: rows from a leader, and Megatron's own groups."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.trainers.reducer import MeetingPoint

RANK = """
import json, sys
import anyio, torch
from asyncrl.configs import load
from asyncrl.configs.load import as_overrides
from asyncrl.engine.aio.blocking import in_thread
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.lifecycle.parts import build_rank, rank_model
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.columns import COLUMNS, TRAINER_LOGPROBS
from asyncrl.engine.records.work import ForwardWork, SampleWork, TrainWork
from asyncrl.engine.weights.base import InProcess
from asyncrl.trainers.fan_out import plan_batch
from asyncrl.trainers.links import meet
from asyncrl.trainers.parallel import Parallel

KEYS = tuple(f"v0_p0_g{i}" for i in range(4))
LENGTHS = {key: n for key, n in zip(KEYS, (9, 6, 7, 4))}


async def main(rank, meeting, settings):
    torch.set_num_threads(1)
    config = load("default", as_overrides(settings)).config
    trainer, parallel = config.trainer, Parallel.of(config.trainer)
    links = await meet(trainer, rank, meeting=meeting, nccl=False, blocking=in_thread)
    plane = LocalPlane()
    await plane.register(Partition("train", 4, COLUMNS, ("trainer",), later=(TRAINER_LOGPROBS,)))
    # The plane of this process is empty but for a leader's: whoever else reads it fails.
    if links.siblings.index == 0:
        random = torch.Generator().manual_seed(1)
        tokens = [torch.randint(1, 12, (n,), generator=random, dtype=torch.int32) for n in LENGTHS.values()]
        logprobs = [torch.full((n - 2,), -2.5) for n in LENGTHS.values()]
        await plane.put("train", GroupMeta(KEYS, {"version": 0, "group": 0}), {"tokens": tokens, "logprobs": logprobs})
    model, transport = rank_model(config, rank), InProcess()
    member = build_rank(config, rank, model=model, plane=plane, links=links, transport=transport, blocking=in_thread)
    samples = {key: SampleWork(key, 2, n - 2, 1.0 - i) for i, (key, n) in enumerate(LENGTHS.items())}
    plan = plan_batch(LENGTHS, ranks=parallel.data, budget_tokens=10)
    batches = plan.ranks[parallel.place(rank).data]
    examples = [([1, 2, 3, 4], 2), ([5, 6, 7], 1), ([8, 9], 1)]
    warmed = await member.warm_up(examples, steps=2, batch=3, learning_rate=0.01)
    own = {key: samples[key] for batch in batches for key in batch.keys}
    gaps = await member.logprobs(ForwardWork(1, tuple(b for b in batches if not b.filler), own, 18, write=True))
    results = []
    for step in (1, 2):
        results.append(await member.train(TrainWork(step, batches, samples, 18)))
    if links.siblings.index:
        for _ in range(2):
            await member.lend_weights()
        told = {}
    else:
        sent = await member.weights()
        sums = {name: float(value.double().abs().sum()) for name, value in sorted(sent.content.items())}
        await member.digest()
        written = await plane.read("train", list(own), [TRAINER_LOGPROBS])
        told = {"weights": sums, "written": {k: v.tolist() for k, v in zip(own, written[TRAINER_LOGPROBS])}}
    print(json.dumps({"warmed": warmed, "gaps": gaps, "norms": [one.grad_norm for one in results],
                      "losses": [one.loss for one in results], "tokens": [one.tokens for one in results], **told}))

anyio.run(main, int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def answers(folder: Path, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    """Run all ranks of such a trainer, and return what they told."""
    named = {f"trainer.{name}": value for name, value in settings.items()}
    chosen = json.dumps({"trainer.ranks": ranks, "trainer.micro_batch_tokens": 10, **named})
    point = MeetingPoint()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), point.address, chosen],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def close(ours: Any, theirs: Any) -> bool:
    return bool(ours == pytest.approx(theirs, rel=2e-4, abs=2e-5))


@pytest.mark.timeout(400)
def test_divided_ranks_train_as_one_rank_of_the_other_backend(tmp_path: Path) -> None:
    """Warm-up, log-probabilities, two steps and the weights: PP 2, and DP 2 with TP 2."""
    (torch,) = answers(tmp_path, 1)
    for ranks, split in ((2, {"pipeline_parallel": 2}), (4, {"tensor_parallel": 2})):
        found = answers(tmp_path, ranks, backend="megatron", **split)
        leaders = [one for one in found if "weights" in one]
        assert len(leaders) == ranks // 2
        assert all(close(one["warmed"], torch["warmed"]) for one in found)
        assert all(close(one["norms"], torch["norms"]) for one in found)
        for what in ("losses", "tokens"):
            assert close([sum(parts) for parts in zip(*(one[what] for one in leaders), strict=True)], torch[what])
        assert all(close(one["weights"], torch["weights"]) for one in leaders)
        written = {key: values for one in leaders for key, values in one["written"].items()}
        assert written.keys() == torch["written"].keys()
        assert all(close(written[key], torch["written"][key]) for key in written)
        for one in found:
            for key, gap in one["gaps"].items():
                assert close(gap, torch["gaps"][key])
