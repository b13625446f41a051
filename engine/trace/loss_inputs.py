"""What a step's loss was computed from, as a file that travels: a step can be run again on a laptop."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.engine.errors import TraceError
from asyncrl.engine.records.work import Update
from asyncrl.trainers.backends.base import Rows

_MOST_DIGITS = 9
_FORMAT = 3
"""1 had neither several updates nor later columns, scales, one length and extras; 2 had no generated places. Both are
still read."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the ranks of one step gave their backends: `rows[rank][micro_batch]`.

    Each of `updates` takes the next `micro_batches` of every rank, and divides by its `tokens`.
    """

    step: int
    rows: Sequence[Sequence[Rows]]
    updates: tuple[Update, ...]

    @property
    def total_tokens(self) -> int:
        """Trained tokens of the step."""
        return sum(update.tokens for update in self.updates)

    def parts(self) -> Iterator[tuple[int, list[Sequence[Rows]]]]:
        """Yield, for each optimizer update, its trained tokens and its `rows[rank][micro_batch]`.

        Each of the rows goes into a backend's `accumulate(rows, tokens)`, as it did in the run.
        """
        at = 0
        for update in self.updates:
            yield update.tokens, [rank[at : at + update.micro_batches] for rank in self.rows]
            at += update.micro_batches


_Tensors = Sequence[torch.Tensor] | None

_COLUMNS: Mapping[str, Callable[[Rows], _Tensors]] = {
    "tokens": lambda rows: rows.tokens,
    "logprobs": lambda rows: rows.logprobs,
    "proximal_logprobs": lambda rows: rows.proximal_logprobs,
    "reference_logprobs": lambda rows: rows.reference_logprobs,
}
_NUMBERS: Mapping[str, tuple[torch.dtype, Callable[[Rows], Sequence[Any] | None]]] = {
    "prompt_tokens": (torch.int64, lambda rows: rows.prompt_tokens),
    "advantages": (torch.float64, lambda rows: rows.advantages),
    "withheld": (torch.int64, lambda rows: rows.withheld),
    "scales": (torch.float64, lambda rows: rows.scales),
}


def save(inputs: LossInputs, path: Path) -> None:
    """Write loss inputs as one safetensors file: `r<rank>/m<micro-batch>/<name>`, rows as `/<name>/<place>`.

    What a step does not use (None) is left out.
    """
    tensors: dict[str, torch.Tensor] = {}
    for rank, micro_batches in enumerate(inputs.rows):
        for place, rows in enumerate(micro_batches):
            at = f"r{rank}/m{place}"
            columns = {name: read(rows) for name, read in _COLUMNS.items()}
            columns |= {f"extras/{name}": values for name, values in rows.extras.items()}
            for name, values in columns.items():
                # A copy: safetensors writes no storage twice, and a filler repeats a row.
                tensors.update({f"{at}/{name}/{i}": value.clone() for i, value in enumerate(values or ())})
            for name, (dtype, numbers_of) in _NUMBERS.items():
                numbers = numbers_of(rows)
                if numbers is not None:
                    tensors[f"{at}/{name}"] = torch.tensor(list(numbers), dtype=dtype)
    about = {
        "step": inputs.step,
        "updates": [[update.micro_batches, update.tokens] for update in inputs.updates],
        "fillers": [[rows.filler for rows in rank] for rank in inputs.rows],
        "pad_to": [[rows.pad_to for rows in rank] for rank in inputs.rows],
        "extras": sorted({name for rank in inputs.rows for rows in rank for name in rows.extras}),
        "generated": [[rows.generated for rows in rank] for rank in inputs.rows],
    }
    save_file(tensors, path, metadata={"format": str(_FORMAT), "inputs": json.dumps(about)})


def load(path: Path | str) -> LossInputs:
    """Read what `save` wrote, of this or an older format; TraceError if it is not there, or is something else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            format_ = check_format(path, metadata, "loss inputs", _FORMAT)
            if format_ is None or "inputs" not in metadata:
                raise TraceError(
                    f"{path} holds no loss inputs, as `asyncrl replay RUN --step N --out FILE` writes them"
                )
            return _read(file, json.loads(metadata["inputs"]))
    except TraceError:
        raise
    # A damaged description: not JSON, or of names, places and numbers that the tensors do not have.
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read as loss inputs: {error}") from error


def check_format(path: Path | str, metadata: Mapping[str, str], what: str, newest: int) -> int | None:
    """Return the format that a file's metadata names, None without one; TraceError if it is newer than `newest`."""
    text = metadata.get("format", "")
    if not text.isdecimal():
        return None
    if len(text) > _MOST_DIGITS or int(text) > newest:
        raise TraceError(
            f"{path} holds {what} of format {text}, and this asyncrl reads up to {newest}; "
            "read it with the asyncrl that wrote it"
        )
    return int(text)


def _read(file: Any, about: Mapping[str, Any]) -> LossInputs:
    names = set(file.keys())
    fillers: list[list[bool]] = about["fillers"]
    updates = about["updates"] if "updates" in about else [[len(fillers[0]), about["total_tokens"]]]

    def rows(rank: int, place: int) -> Rows:
        at = f"r{rank}/m{place}"
        numbers = {name: file.get_tensor(f"{at}/{name}").tolist() for name in _NUMBERS if f"{at}/{name}" in names}
        count = range(len(numbers["advantages"]))

        def column(name: str) -> list[torch.Tensor]:
            return [file.get_tensor(f"{at}/{name}/{i}") for i in count]

        columns = {name: column(name) for name in _COLUMNS if f"{at}/{name}/0" in names}
        return Rows(
            tokens=columns["tokens"],
            logprobs=columns["logprobs"],
            prompt_tokens=numbers["prompt_tokens"],
            advantages=numbers["advantages"],
            withheld=numbers["withheld"],
            filler=fillers[rank][place],
            proximal_logprobs=columns.get("proximal_logprobs"),
            reference_logprobs=columns.get("reference_logprobs"),
            scales=numbers.get("scales"),
            pad_to=about["pad_to"][rank][place] if "pad_to" in about else 0,
            extras={name: column(f"extras/{name}") for name in about.get("extras", ())},
            generated=about["generated"][rank][place] if "generated" in about else None,
        )

    return LossInputs(
        about["step"],
        [[rows(rank, place) for place in range(len(places))] for rank, places in enumerate(fillers)],
        tuple(Update(micro_batches, tokens) for micro_batches, tokens in updates),
    )
