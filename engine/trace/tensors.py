"""The rows of a run's steps, kept beside its log. Together with the log they give back the inputs of each loss.

`--record tensors` writes, before each step, the rows of its samples into `tensors/step-000012.safetensors`.
The plan, advantages, masks and counts are not recorded, because the replay derives them again.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.deployment import PARTITION
from asyncrl.engine.errors import NotWritten, TraceError
from asyncrl.engine.records import MicroBatch
from asyncrl.engine.records.columns import COLUMNS, REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from asyncrl.engine.records.work import TrainWork
from asyncrl.engine.trace.loss_inputs import LossInputs, check_format
from asyncrl.trainers.extras import extras_of
from asyncrl.trainers.rank import rows_of

FOLDER = "tensors"
_FORMAT = 2
"""Format 1 had no metadata and only the columns of every put; it can still be read."""


def step_file(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}.safetensors"


class TensorRecorder:
    """Writes the rows of each step beside the log, before the ranks train on them.

    `columns` are the later columns that the ranks will read too; they exist when a step is recorded. The extras of the
    partition, which every model is given, are recorded as well.
    """

    def __init__(self, plane: DataPlane, run: Path, *, blocking: Blocking[Any], columns: Sequence[str] = ()) -> None:
        self._plane = plane
        self._run = run
        self._blocking = blocking
        self._later = tuple(columns)
        try:
            (run / FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotWritten.of(run / FOLDER, error) from error

    async def record(self, step: int, keys: Sequence[str]) -> None:
        names = (*COLUMNS, *self._later, *extras_of(await self._plane.partition(PARTITION)))
        columns = await self._plane.read(PARTITION, keys, names)
        tensors = {
            f"{name}/{key}": value.contiguous()
            for name in names
            for key, value in zip(keys, columns[name], strict=True)
        }
        metadata = {"format": str(_FORMAT), "columns": json.dumps(names)}
        path = step_file(self._run, step)
        part = path.with_suffix(".part")

        def write() -> None:
            try:
                save_file(tensors, part, metadata=metadata)
                part.replace(path)
            except (OSError, SafetensorError) as error:
                with suppress(OSError):  # A half-written file takes space that the log may need.
                    part.unlink(missing_ok=True)
                raise NotWritten.of(path, error) from error

        await self._blocking(write)


def rebuild(run: Path, works: Sequence[TrainWork]) -> LossInputs:
    """Join a step's work, from the replay, with its recorded rows; TraceError if those are not there."""
    path = step_file(run, works[0].step)
    if not path.exists():
        raise TraceError(f"{path} does not exist; tensors are kept by runs with --record tensors (run.record)")
    try:
        with safe_open(path, framework="pt") as file:
            recorded = _Recorded(path, file)
            rows = [
                [rows_of(work, batch, recorded.values(work, batch)) for batch in work.micro_batches] for work in works
            ]
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    return LossInputs(works[0].step, rows, works[0].parts)


class _Recorded:
    """The columns of one step's file, by key."""

    def __init__(self, path: Path, file: Any) -> None:
        metadata: Mapping[str, str] = file.metadata() or {}
        self._path = path
        self._file = file
        self._names = set(file.keys())
        format_ = check_format(path, metadata, "recorded tensors", _FORMAT)
        try:
            self._columns: Sequence[str] = (
                COLUMNS if format_ is None else list(map(str, json.loads(metadata["columns"])))
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TraceError(f"{path} does not say which columns it has: {error!r}") from error

    def values(self, work: TrainWork, batch: MicroBatch) -> dict[str, list[torch.Tensor]]:
        """Return what the rank read for a micro-batch: every put's columns, the stage's later ones, and extras."""
        known = {*COLUMNS, TRAINER_LOGPROBS, REFERENCE_LOGPROBS}
        extras = [name for name in self._columns if name not in known]
        return {name: self._column(name, batch.keys) for name in (*COLUMNS, *work.columns, *extras)}

    def _column(self, name: str, keys: Sequence[str]) -> list[torch.Tensor]:
        if name not in self._columns:
            raise TraceError(
                f"{self._path} has {', '.join(self._columns)}, but the loss was also computed from {name}, "
                "which the asyncrl that recorded the run did not keep"
            )
        lacking = [key for key in keys if f"{name}/{key}" not in self._names]
        if lacking:
            raise TraceError(f"{self._path} has no {name} of {lacking[:3]}; it belongs to another run than the log")
        return [self._file.get_tensor(f"{name}/{key}") for key in keys]
