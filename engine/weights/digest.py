"""Sums over weights by which processes find out, at version 0, whether they hold the same model."""

from collections.abc import Mapping

import torch

from asyncrl.engine.errors import VersionError
from asyncrl.engine.weights.base import State

Digest = Mapping[str, int]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(state: State) -> dict[str, int]:
    """Return, by weight, the sum of its numbers' bits, modulo 2^64: exact, in whatever order they are added."""
    return {name: _sum(tensor) for name, tensor in state.items()}


def check_equal(digests: Mapping[str, Digest]) -> None:
    """Raise VersionError for a process whose weights are not the first one's, with their names."""
    (first, expected), *others = digests.items()
    for name, found in others:
        differ = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
        if differ:
            raise VersionError(
                f"{name} does not hold the weights of {first} at version 0: {len(differ)} of {len(expected)} differ, "
                f"such as {differ[0]}; every process must load the same checkpoint, whole"
            )


def _sum(tensor: torch.Tensor) -> int:
    words = tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))
