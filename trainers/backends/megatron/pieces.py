"""A micro-batch in pieces of samples, so that the stages of a pipeline have work at the same time."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from asyncrl.trainers.backends.base import Rows


def in_pieces(rows: Rows, count: int) -> list[Rows]:
    """Divide samples, in order, among at most `count` pieces: 5 samples among 2 are 2 and 3."""
    samples = len(rows.tokens)
    pieces = min(count, samples)
    bounds = [samples * i // pieces for i in range(pieces + 1)]
    return [_some(rows, slice(*ends)) for ends in pairwise(bounds)]


def _some(rows: Rows, samples: slice) -> Rows:
    changes: dict[str, Any] = {"extras": {name: values[samples] for name, values in rows.extras.items()}}
    for one in fields(rows):
        value = getattr(rows, one.name)
        # What is left out is None or empty, and what is no sequence holds for all samples.
        if one.name != "extras" and hasattr(value, "__getitem__"):
            changes[one.name] = value[samples]
    return replace(rows, **changes)
