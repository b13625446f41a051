"""Filters on the tokens of a response, through taggers that run in the collector."""

from collections.abc import Mapping
from typing import ClassVar

from asyncrl.filters.base import BaseRolloutFilter, FilterContext, GroupView
from asyncrl.filters.taggers import Tagger, repetition_tagger, response_hash
from asyncrl.filters.verdict import Verdict, drop, keep, mask

RESPONSE_HASH = "response_hash"


class Repetition(BaseRolloutFilter):
    """Mask responses that repeat themselves (reason `repetition`).

    A response is masked if more than `max_share` of its n-grams of length `ngram` occurred earlier in it.
    """

    name = "repetition"
    mask_reasons = ("repetition",)

    def __init__(self, max_share: float = 0.5, ngram: int = 4, keep_reward: bool = True) -> None:
        if not 0 <= max_share < 1:
            raise ValueError(f"max_share is {max_share}; it must be in [0, 1)")
        if ngram < 1:
            raise ValueError(f"ngram is {ngram}; it must be at least 1")
        self._max_share = max_share
        self._keep_reward = keep_reward
        self._tag = f"repetition_{ngram}"
        self.requires = (self._tag,)  # type: ignore[misc]
        self.taggers = {self._tag: repetition_tagger(ngram)}  # type: ignore[misc]

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        shares = group.tag(self._tag)
        bad = [i for i in group.trained if shares[i] is not None and shares[i] > self._max_share]
        return mask(bad, "repetition", keep_reward=self._keep_reward) if bad else keep()


class Duplicate(BaseRolloutFilter):
    """Mask responses that are equal to an earlier trained response of their group (reason `duplicate`).

    With `min_distinct`, drop groups with fewer different live responses than that (reason `few_distinct`).
    """

    name = "duplicate"
    requires = (RESPONSE_HASH,)
    drop_reasons = ("few_distinct",)
    mask_reasons = ("duplicate",)
    taggers: ClassVar[Mapping[str, Tagger]] = {RESPONSE_HASH: response_hash}

    def __init__(self, min_distinct: int | None = None, keep_reward: bool = True) -> None:
        if min_distinct is not None and min_distinct < 2:
            raise ValueError(f"min_distinct is {min_distinct}; it must be at least 2")
        self._min_distinct = min_distinct
        self._keep_reward = keep_reward

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        hashes = group.tag(RESPONSE_HASH)
        if self._min_distinct is not None and len({hashes[i] for i in group.live}) < self._min_distinct:
            return drop("few_distinct")
        seen: set[int] = set()
        repeated = []
        for i in group.trained:
            if hashes[i] in seen:
                repeated.append(i)
            seen.add(hashes[i])
        return mask(repeated, "duplicate", keep_reward=self._keep_reward) if repeated else keep()
