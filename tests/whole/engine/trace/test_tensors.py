"""Recorded tensors: what the ranks' backends were given comes back bit for bit, from the log and the rows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.collectors.tasks.prepared import prepare_task
from asyncrl.configs import Override, RunConfig, load
from asyncrl.engine.aio.blocking import in_place
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import PARTITION, Deployment
from asyncrl.engine.errors import NotWritten, TraceError
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import SCHEMA, RunStarted
from asyncrl.engine.lifecycle.local import local_deployment
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.stages import later_columns
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.records.work import SampleWork, TrainWork
from asyncrl.engine.simulate.virtual_loop import build_collectors
from asyncrl.engine.testing.conformance.spanning import SpanningGenerator
from asyncrl.engine.testing.fakes import FakeTask, fake_group
from asyncrl.engine.trace import loss_inputs
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import rank_works, replay
from asyncrl.engine.trace.tensors import TensorRecorder, rebuild, step_file
from asyncrl.filters import build_chain
from asyncrl.trainers.backends.base import Rows

SMALL: Mapping[str, Any] = {
    "run.runtime": "local",
    "run.batches": 3,
    "model.hidden_size": 16,
    "model.layers": 1,
    "model.intermediate_size": 16,
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "trainer.micro_batch_tokens": 24,
    "filters": [],
}


def config_of(**settings: Any) -> RunConfig:
    values = {**SMALL, **{name.replace("__", "."): value for name, value in settings.items()}}
    return load("default", [Override(path, value, path) for path, value in values.items()]).config


class Spy:
    """Keeps what a rank's backend is given, by step and in order, and passes it on."""

    def __init__(self, backend: Any, updates: int) -> None:
        self._backend = backend
        self._updates = updates
        self._applied = 0
        self.steps: list[list[tuple[int, list[Any]]]] = [[]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(self, rows: Rows, total_tokens: int) -> Any:
        self.steps[-1].append((total_tokens, bits(rows)))
        return self._backend.accumulate(rows, total_tokens)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self._applied += 1
        if self._applied % self._updates == 0:
            self.steps.append([])
        return self._backend.apply(*args, **kwargs)


def bits(rows: Rows) -> list[Any]:
    """All of a micro-batch, each float as its bits."""

    def of(tensors: Any) -> Any:
        return None if tensors is None else [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]

    return [
        *map(of, (rows.tokens, rows.logprobs, rows.proximal_logprobs, rows.reference_logprobs)),
        list(rows.prompt_tokens),
        [value.hex() for value in rows.advantages],
        list(rows.withheld),
        None if rows.scales is None else [value.hex() for value in rows.scales],
        (rows.filler, rows.pad_to),
        {name: of(values) for name, values in rows.extras.items()},
    ]


def run_local(config: RunConfig, folder: Path, *, spanning: bool = False) -> list[Spy]:
    """Record a run in this process; return what was given to its backends, by rank."""
    spies: list[Spy] = []

    async def run() -> None:
        async with local_deployment(
            config, prepare_task(config.task.name, config.task.options, warm_up=False)
        ) as world:
            columns = later_columns(config.trainer)
            record = TensorRecorder(world.plane, folder, blocking=in_place, columns=columns).record
            used = replace(world, cost=None, record=record)
            if spanning:
                used = replace(used, collectors=_spanning(config, world))
            progress = Progress()
            log = EventLog(clock=anyio.current_time, wall=lambda: 0.0, folds=[progress], path=folder / "events.jsonl")
            for rank in world.ranks:
                spies.append(Spy(rank._backend, config.trainer.updates_per_batch))  # type: ignore[attr-defined]
                rank._backend = spies[-1]  # type: ignore[attr-defined]
            log.append(RunStarted(schema=SCHEMA, config=config.model_dump(), software={}))
            controller = Controller(
                config,
                used,
                chain=build_chain(config.filters, min_live=2),
                events=log,
                progress=progress,
                clock=anyio.current_time,
            )
            ending = await controller.run()
            assert ending.code == 0, ending
            log.close()

    run_virtual(run)
    return spies


def _spanning(config: RunConfig, world: Deployment) -> Any:
    """Collectors whose weights are swapped within a response, so that its first tokens are older."""
    generator = SpanningGenerator(
        seconds=lambda call: 1.0 + call % 5, length=lambda call: 3 + call % 4, clock=anyio.current_time
    )
    return build_collectors(config, [generator], task=FakeTask(), tokenizer=CharTokenizer(), plane=world.plane)


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer__loss_normalisation": "sequence_mean"},
        {"trainer__recompute_logprobs": True, "trainer__packed": True, "trainer__pad_to_step_length": True},
        {
            "trainer__updates_per_batch": 2,
            "trainer__reference_kl": 0.1,
            "trainer__pad_to_step_length": True,
            "trainer__loss_normalisation": "constant",
            "rollout__stale_mode": "tokens",
            "rollout__max_staleness": 1,
            "rollout__max_new_tokens": 6,
            "trainer__min_step_s": 1.0,
        },
    ],
    ids=["as by default", "proximal, packed, one length", "several updates, a reference, withheld tokens"],
)
def test_what_every_backend_was_given_comes_back_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Whatever the configuration has the ranks read; each run is one of several ranks, micro-batches and steps."""
    config = config_of(**settings)
    spies = run_local(config, tmp_path, spanning=config.rollout.stale_mode == "tokens")
    replayed = replay(Recording.read(tmp_path))
    assert replayed.difference is None
    seen: list[Rows] = []
    for step in (1, 2, 3):
        path = tmp_path / f"step{step}.safetensors"
        loss_inputs.save(rebuild(tmp_path, rank_works(replayed, step)), path)
        back = loss_inputs.load(path)
        assert back.step == step
        assert len(back.updates) == config.trainer.updates_per_batch
        for rank, spy in enumerate(spies):
            given = [(tokens, bits(rows)) for tokens, ranks in back.parts() for rows in ranks[rank]]
            assert given == spy.steps[step - 1]
            assert len(given) > 1
        seen.extend(rows for rank in back.rows for rows in rank)
    # That the run had what this is about.
    trainer = config.trainer
    assert all((rows.proximal_logprobs is not None) == trainer.decoupled for rows in seen)
    assert all((rows.reference_logprobs is not None) == (trainer.reference_kl > 0) for rows in seen)
    assert all((rows.scales is not None) == (trainer.reference_kl > 0) for rows in seen)
    assert all((rows.pad_to > 0) == trainer.pad_to_step_length for rows in seen)
    assert any(any(rows.withheld) for rows in seen) == (config.rollout.stale_mode == "tokens")


def test_extras_of_the_partition_are_recorded_and_objects_are_not(tmp_path: Path) -> None:
    """Tensors of any shape that a task attaches go to every model, so they belong to what the loss is computed from."""
    group = fake_group(3, [0.0, 1.0])
    pixels = [torch.rand(1, 2, 2, dtype=torch.float64), torch.rand(3, 2, 2, dtype=torch.float64)]

    async def run() -> None:
        plane = LocalPlane(clock=anyio.current_time)
        columns = (*COLUMNS, "pixels", "note")
        await plane.register(Partition(PARTITION, 2, columns, ("trainer",), objects=("note",)))
        values = {TOKENS: [torch.arange(4, dtype=torch.int32)] * 2, LOGPROBS: [torch.zeros(2)] * 2}
        await plane.put(PARTITION, group, {**values, "pixels": pixels, "note": [{"a": 1}, None]})
        await TensorRecorder(plane, tmp_path, blocking=in_place).record(1, group.keys)

    anyio.run(run)
    samples = {key: SampleWork(key, 0, 2, 0.5) for key in group.keys}
    work = TrainWork(1, (MicroBatch(group.keys, 8),), samples, total_tokens=4)
    [[rows]] = rebuild(tmp_path, [work]).rows
    assert rows.extras.keys() == {"pixels"}
    assert all(torch.equal(one, other) for one, other in zip(rows.extras["pixels"], pixels, strict=True))


def test_a_run_without_tensors_says_how_to_get_them(tmp_path: Path) -> None:
    work = TrainWork(3, (), {}, total_tokens=0)
    with pytest.raises(TraceError, match=r"step-000003\.safetensors does not exist; .*--record tensors"):
        rebuild(tmp_path, [work])


def test_a_file_that_lacks_what_the_loss_was_computed_from_is_refused(tmp_path: Path) -> None:
    """One that an older asyncrl recorded, a newer one's, one that broke off, and another run's."""
    config = config_of(run__batches=1, trainer__recompute_logprobs=True)
    run_local(config, tmp_path)
    works = rank_works(replay(Recording.read(tmp_path)), 1)
    path = step_file(tmp_path, 1)
    tensors = load_file(path)
    rebuild(tmp_path, works)

    save_file({name: value for name, value in tensors.items() if not name.startswith("trainer_logprobs/")}, path)
    with pytest.raises(TraceError, match=r"has tokens, logprobs, but the loss was also computed from trainer_logpr"):
        rebuild(tmp_path, works)
    save_file(tensors, path, metadata={"format": "3"})
    with pytest.raises(TraceError, match="recorded tensors of format 3, and this asyncrl reads up to 2"):
        rebuild(tmp_path, works)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"step-000001\.safetensors cannot be read"):
        rebuild(tmp_path, works)
    save_file({"tokens/v0_p99_g0": torch.zeros(1)}, path)
    with pytest.raises(TraceError, match=r"has no tokens of .*; it belongs to another run"):
        rebuild(tmp_path, works)


def test_a_file_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    """It said nothing of itself and held tokens and log-probabilities, which is all that this loss needs."""
    run_local(config_of(run__batches=1), tmp_path)
    works = rank_works(replay(Recording.read(tmp_path)), 1)
    now = rebuild(tmp_path, works)
    save_file(load_file(step_file(tmp_path, 1)), step_file(tmp_path, 1))
    then = rebuild(tmp_path, works)
    assert [[bits(rows) for rows in rank] for rank in then.rows] == [[bits(r) for r in rank] for rank in now.rows]


@pytest.mark.parametrize("taken", ["tensors", "tensors/step-000001.safetensors"])
def test_rows_that_cannot_be_written_name_the_file_and_leave_no_part_of_it(tmp_path: Path, taken: str) -> None:
    """FOUND-C11: what there is of it would take the room that the log needs."""
    keys = fake_group(0, [1.0]).keys

    async def main() -> None:
        plane = LocalPlane()
        await plane.register(Partition(PARTITION, 1, COLUMNS, ("trainer",)))
        columns = {TOKENS: [torch.ones(2, dtype=torch.int32)], LOGPROBS: [torch.zeros(1)]}
        await plane.put(PARTITION, fake_group(0, [1.0]), columns)
        await TensorRecorder(plane, tmp_path, blocking=in_place).record(1, keys)

    if taken == "tensors":
        (tmp_path / taken).write_text("")
    else:
        (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(NotWritten, match=f"{taken} could not be written"):
        anyio.run(main)
    assert list(tmp_path.rglob("*.part")) == []
