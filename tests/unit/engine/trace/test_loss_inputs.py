"""Recorded tensors: what the ranks' backends were given comes back bit for bit, from the log and the rows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.configs import Override, load
from asyncrl.engine.controller import Controller
from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import SCHEMA, RunStarted
from asyncrl.engine.lifecycle.local import local_world
from asyncrl.engine.offload import in_place
from asyncrl.engine.records.work import RankWork
from asyncrl.engine.trace import loss_inputs
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import rank_works, replay
from asyncrl.filters import build_chain
from asyncrl.trainers.backends.base import Rows


class Spy:
    """Keeps what a rank's backend is given, and passes it on."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.steps: list[list[Rows]] = [[]]
        self.totals: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(self, rows: Rows, total_tokens: int) -> Any:
        self.steps[-1].append(rows)
        self.totals.append(total_tokens)
        return self._backend.accumulate(rows, total_tokens)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.append([])
        return self._backend.apply(*args, **kwargs)


def bits(rows: Rows) -> list[Any]:
    tensors = [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in (*rows.tokens, *rows.logprobs)]
    numbers = [list(rows.prompt_tokens), [value.hex() for value in rows.advantages], list(rows.withheld)]
    return [tensors, numbers, rows.filler]


@pytest.mark.timeout(110)
def test_the_loss_inputs_of_every_step_come_back_bit_for_bit(tmp_path: Path) -> None:
    settings = {
        "run.runtime": "local",
        "run.batches": 3,
        "rollout.groups_per_step": 4,
        "rollout.group_size": 4,
        "trainer.micro_batch_tokens": 24,
        "trainer.loss_normalisation": "sequence_mean",
        "filters": [],
    }
    config = load("default", [Override(path, value, path) for path, value in settings.items()]).config
    spies: list[Spy] = []

    async def run() -> None:
        async with local_world(config) as world:
            progress = Progress()
            log = EventLog(clock=anyio.current_time, wall=lambda: 0.0, folds=[progress], path=tmp_path / "events.jsonl")
            for rank in world.ranks:
                spies.append(Spy(rank._backend))  # type: ignore[attr-defined]
                rank._backend = spies[-1]  # type: ignore[attr-defined]
            log.append(RunStarted(schema=SCHEMA, config=config.model_dump(), software={}))
            controller = Controller(
                config,
                replace(world, cost=None),
                chain=build_chain(config.filters, min_live=2),
                events=log,
                progress=progress,
                clock=anyio.current_time,
                record=loss_inputs.TensorRecorder(world.plane, tmp_path, offload=in_place).record,
            )
            assert (await controller.run()).code == 0
            log.close()

    anyio.run(run)
    replayed = replay(Recording.read(tmp_path))
    assert replayed.difference is None
    for step in (1, 2, 3):
        path = tmp_path / f"step{step}.safetensors"
        loss_inputs.save(loss_inputs.rebuild(tmp_path, rank_works(replayed, step)), path)
        back = loss_inputs.load(path)
        given = [spy.steps[step - 1] for spy in spies]
        assert [[bits(rows) for rows in rank] for rank in back.rows] == [
            [bits(rows) for rows in rank] for rank in given
        ]
        assert back.step == step
        assert back.total_tokens in spies[0].totals
    assert all(len(rank) > 1 for rank in back.rows)


def rows(filler: bool = False) -> Rows:
    odd = torch.tensor([math.nan, -math.inf, -0.0, 1e-45], dtype=torch.float32)
    return Rows([torch.arange(6, dtype=torch.int32)], [odd], [2], [0.1 + 0.2], [1], filler)


def test_odd_numbers_and_fillers_survive_the_file(tmp_path: Path) -> None:
    inputs = loss_inputs.LossInputs(7, [[rows(), rows(filler=True)], [rows(), rows()]], 9)
    loss_inputs.save(inputs, tmp_path / "x.safetensors")
    back = loss_inputs.load(tmp_path / "x.safetensors")
    assert [[bits(r) for r in rank] for rank in back.rows] == [[bits(r) for r in rank] for rank in inputs.rows]
    assert (back.step, back.total_tokens) == (7, 9)


def test_a_run_without_tensors_says_how_to_get_them(tmp_path: Path) -> None:
    work = RankWork(3, (), {}, {}, {}, 0)
    with pytest.raises(TraceError, match=r"step-000003\.safetensors is not there; .*--record tensors"):
        loss_inputs.rebuild(tmp_path, [work])
    torch_file = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, torch_file)
    with pytest.raises(TraceError, match="holds no loss inputs"):
        loss_inputs.load(torch_file)
