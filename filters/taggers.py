"""Taggers: functions that the collector runs on a response's tokens for a filter; each gives one tag."""

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Protocol


class Tagger(Protocol):
    """Maps the token ids of one response to one tag value. Must be picklable and fast."""

    def __call__(self, tokens: Sequence[int], /) -> int | float | str | bool | None: ...


def repetition(tokens: Sequence[int], ngram: int) -> float:
    """Return the share of n-grams that occurred earlier in the response, in [0, 1).

    Example: [1, 2, 1, 2] has the 2-grams 12, 21, 12, so the share is 1/3.
    """
    grams = Counter(tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def response_hash(tokens: Sequence[int]) -> int:
    """Return a 32-bit checksum; equal responses have the same one in every process."""
    return zlib.crc32(",".join(map(str, tokens)).encode())


def repetition_tagger(ngram: int) -> Tagger:
    return partial(repetition, ngram=ngram)
