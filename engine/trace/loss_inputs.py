"""Recorded tensors, and from them and the log what a step's loss was computed from, bit for bit.

`--record tensors` writes, before each step, the rows of its samples into `tensors/step-000012.safetensors`.
The plan, advantages, masks and counts are not recorded: the replay derives them again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.errors import TraceError
from asyncrl.engine.lifecycle.base import PARTITION
from asyncrl.engine.offload import Offload
from asyncrl.engine.records.columns import COLUMNS, LOGPROBS, TOKENS
from asyncrl.engine.records.work import RankWork
from asyncrl.trainers.backends.base import Rows

FOLDER = "tensors"
_FORMAT = "1"


def step_file(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}.safetensors"


class TensorRecorder:
    """Writes the rows of each step beside the log, before the ranks train on them."""

    def __init__(self, plane: DataPlane, run: Path, *, offload: Offload[Any]) -> None:
        self._plane = plane
        self._run = run
        self._offload = offload
        (run / FOLDER).mkdir(parents=True, exist_ok=True)

    async def record(self, step: int, keys: Sequence[str]) -> None:
        columns = await self._plane.read(PARTITION, keys, COLUMNS)
        tensors = {
            f"{column}/{key}": value.contiguous()
            for column in COLUMNS
            for key, value in zip(keys, columns[column], strict=True)
        }
        path = step_file(self._run, step)
        await self._offload(lambda: save_file(tensors, path))


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the ranks of one step gave their backends: `rows[rank][micro_batch]`, and the tokens they divide by."""

    step: int
    rows: Sequence[Sequence[Rows]]
    total_tokens: int


def rebuild(run: Path, works: Sequence[RankWork]) -> LossInputs:
    """Join a step's work, from the replay, with its recorded rows; TraceError if those are not there."""
    step = works[0].step
    path = step_file(run, step)
    if not path.exists():
        raise TraceError(f"{path} is not there; tensors are kept by runs with --record tensors (run.record)")
    recorded = load_file(path)

    def column(name: str, keys: Sequence[str]) -> list[torch.Tensor]:
        lacking = [key for key in keys if f"{name}/{key}" not in recorded]
        if lacking:
            raise TraceError(f"{path} has no {name} of {lacking[:3]}; it belongs to another run than the log")
        return [recorded[f"{name}/{key}"] for key in keys]

    return LossInputs(
        step,
        [
            [
                Rows(
                    tokens=column(TOKENS, batch.keys),
                    logprobs=column(LOGPROBS, batch.keys),
                    prompt_tokens=[work.prompt_tokens[key] for key in batch.keys],
                    advantages=[work.advantages[key] for key in batch.keys],
                    withheld=[work.withheld[key] for key in batch.keys],
                    filler=batch.filler,
                )
                for batch in work.micro_batches
            ]
            for work in works
        ],
        works[0].total_tokens,
    )


_Numbers: Mapping[str, tuple[torch.dtype, Callable[[Rows], Sequence[Any]]]] = {
    "prompt_tokens": (torch.int64, lambda rows: rows.prompt_tokens),
    "advantages": (torch.float64, lambda rows: rows.advantages),
    "withheld": (torch.int64, lambda rows: rows.withheld),
}


def save(inputs: LossInputs, path: Path) -> None:
    """Write loss inputs as one safetensors file: `r<rank>/m<micro-batch>/<name>`, rows as `/<name>/<place>`."""
    tensors: dict[str, torch.Tensor] = {}
    fillers = []
    for rank, micro_batches in enumerate(inputs.rows):
        fillers.append([rows.filler for rows in micro_batches])
        for place, rows in enumerate(micro_batches):
            at = f"r{rank}/m{place}"
            for name, values in ((TOKENS, rows.tokens), (LOGPROBS, rows.logprobs)):
                # A copy: safetensors writes no storage twice, and a filler repeats a row.
                tensors.update({f"{at}/{name}/{i}": value.clone() for i, value in enumerate(values)})
            for name, (dtype, read) in _Numbers.items():
                tensors[f"{at}/{name}"] = torch.tensor(list(read(rows)), dtype=dtype)
    about = {"step": inputs.step, "total_tokens": inputs.total_tokens, "fillers": fillers}
    save_file(tensors, path, metadata={"format": _FORMAT, "inputs": json.dumps(about)})


def load(path: Path) -> LossInputs:
    """Read what `save` wrote; give `rows` to a backend's `accumulate` to run the step anywhere."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT or "inputs" not in metadata:
            raise TraceError(f"{path} holds no loss inputs of format {_FORMAT}")
        about = json.loads(metadata["inputs"])

        def rows(at: str, *, filler: bool) -> Rows:
            numbers = {name: file.get_tensor(f"{at}/{name}").tolist() for name in _Numbers}
            count = range(len(numbers["advantages"]))
            return Rows(
                tokens=[file.get_tensor(f"{at}/{TOKENS}/{i}") for i in count],
                logprobs=[file.get_tensor(f"{at}/{LOGPROBS}/{i}") for i in count],
                prompt_tokens=numbers["prompt_tokens"],
                advantages=numbers["advantages"],
                withheld=numbers["withheld"],
                filler=filler,
            )

        return LossInputs(
            about["step"],
            [
                [rows(f"r{rank}/m{place}", filler=filler) for place, filler in enumerate(fillers)]
                for rank, fillers in enumerate(about["fillers"])
            ],
            about["total_tokens"],
        )
