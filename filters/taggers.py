"""Functions that filters have run in the collector on a response's tokens; each gives one tag."""

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Protocol


class Tagger(Protocol):
    """From the token ids of one response to one tag value. It must be picklable and quick."""

    def __call__(self, tokens: Sequence[int], /) -> int | float | str | bool | None: ...


def repetition(tokens: Sequence[int], ngram: int) -> float:
    """Return the share of n-grams that have occurred before in the response, in [0, 1)."""
    grams = Counter(tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def response_hash(tokens: Sequence[int]) -> int:
    """Return a 32-bit checksum of the response, equal for equal responses in every process."""
    return zlib.crc32(",".join(map(str, tokens)).encode())


def repetition_tagger(ngram: int) -> Tagger:
    return partial(repetition, ngram=ngram)
