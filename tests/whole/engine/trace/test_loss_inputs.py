"""Loss inputs go through their file bit for bit, and files that are something else are refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engine.errors import TraceError
from asyncrl.engine.records.work import Update
from asyncrl.engine.trace.loss_inputs import LossInputs, load, save
from asyncrl.trainers.backends.base import Rows

ODD = torch.tensor([math.nan, -math.inf, -0.0, 1e-45], dtype=torch.float32)
TOKENS = torch.arange(6, dtype=torch.int32)


def rows(filler: bool = False) -> Rows:
    """As simple as a step can be."""
    return Rows([TOKENS], [ODD], [2], [0.1 + 0.2], [1], filler)


def full_rows() -> Rows:
    """With everything that a configuration or a partition can add."""
    return Rows(
        [TOKENS, TOKENS + 1],
        [ODD, ODD + 1],
        [2, 2],
        [1 / 3, -1 / 3],
        [0, 1],
        False,
        proximal_logprobs=[ODD - 1, ODD],
        reference_logprobs=[ODD * 2, ODD],
        scales=[1 / 7, math.pi],
        pad_to=16,
        extras={"pixels": [torch.ones(3, 2, 2, dtype=torch.bfloat16), torch.zeros(1, 2, 2, dtype=torch.bfloat16)]},
        generated=["0:1,3:4", ""],
    )


def same(one: Rows, other: Rows) -> bool:
    def bits(tensors: object) -> object:
        assert isinstance(tensors, list | None)
        return tensors and [(t.dtype, tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for t in tensors]

    columns = [
        (one.tokens, other.tokens),
        (one.logprobs, other.logprobs),
        (one.proximal_logprobs, other.proximal_logprobs),
        (one.reference_logprobs, other.reference_logprobs),
    ]
    numbers = ("prompt_tokens", "advantages", "withheld", "filler", "scales", "pad_to", "generated")
    return (
        all(bits(a) == bits(b) for a, b in columns)
        and all(getattr(one, name) == getattr(other, name) for name in numbers)
        and {name: bits(values) for name, values in one.extras.items()}
        == {name: bits(values) for name, values in other.extras.items()}
    )


def test_odd_numbers_fillers_and_all_that_a_step_can_read_survive_the_file(tmp_path: Path) -> None:
    for ranks in ([[rows(), rows(filler=True)], [rows(), rows()]], [[full_rows(), full_rows()]]):
        inputs = LossInputs(7, ranks, (Update(1, 4), Update(1, 5)))
        save(inputs, tmp_path / "x.safetensors")
        back = load(tmp_path / "x.safetensors")
        assert (back.step, back.updates, back.total_tokens) == (7, inputs.updates, 9)
        for rank, given in zip(back.rows, ranks, strict=True):
            assert all(same(a, b) for a, b in zip(rank, given, strict=True))
        assert [(tokens, [len(rank) for rank in part]) for tokens, part in back.parts()] == [
            (4, [1] * len(ranks)),
            (5, [1] * len(ranks)),
        ]


def test_a_file_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    """As it was written before there were several updates, later columns and extras."""
    tensors = {
        "r0/m0/tokens/0": TOKENS,
        "r0/m0/logprobs/0": ODD,
        "r0/m0/prompt_tokens": torch.tensor([2]),
        "r0/m0/advantages": torch.tensor([0.1 + 0.2], dtype=torch.float64),
        "r0/m0/withheld": torch.tensor([1]),
    }
    about = {"step": 7, "total_tokens": 3, "fillers": [[True]]}
    save_file(tensors, tmp_path / "old.safetensors", metadata={"format": "1", "inputs": json.dumps(about)})
    back = load(tmp_path / "old.safetensors")
    assert (back.step, back.updates) == (7, (Update(1, 3),))
    assert same(back.rows[0][0], rows(filler=True))


def test_what_holds_no_loss_inputs_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    with pytest.raises(TraceError, match=r"other\.safetensors cannot be read as loss inputs"):
        load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(TraceError, match="holds no loss inputs, as `asyncrl replay RUN --step N --out FILE` writes"):
        load(path)
    save_file({"a": torch.zeros(1)}, path, metadata={"format": "4", "inputs": "{}"})
    with pytest.raises(TraceError, match="loss inputs of format 4, and this asyncrl reads up to 3"):
        load(path)
