"""Many groups as columns: NumPy arrays over groups and samples, for fast filters.

Invariant: all groups of one `GroupColumns` have the same size. A column is built from tags once, at first use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.group import integer_tag

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class GroupColumns:
    """`n` groups of `size` samples.

    `open` (n) marks the groups that are not dropped yet. `live` and `trained` (n, size) mark samples as in GroupView.
    A filter may compute on all groups; the results for groups that are not open are ignored.
    """

    def __init__(self, groups: Sequence[GroupMeta]) -> None:
        self.groups = groups
        self.n = len(groups)
        self.size = groups[0].size if groups else 0
        self._numbers: dict[str, Floats] = {}
        self.rewards = self.numbers(tag.REWARD)
        self.finished = self._finished()
        self.rewarded: Flags = self.finished & np.isfinite(self.rewards)
        self.trained: Flags = self.rewarded & (self.numbers(tag.TRAINABLE_TOKENS) > 0)
        # A sample without a token to train gives no gradient. Its reward would make a flat group look mixed.
        self.live: Flags = self.trained.copy()
        self.open: Flags = np.ones(self.n, dtype=np.bool_)

    @property
    def lengths(self) -> Floats:
        """Response tokens (n, size)."""
        return self.numbers(tag.RESPONSE_TOKENS)

    def versions(self) -> Integers:
        """Return the oldest version of each group (n); TagError if one is not an integer."""
        values = [group.group_tag(tag.VERSION) for group in self.groups]
        if set(map(type, values)) - {int}:
            values = [
                integer_tag(value, key=group.keys[0], tag=tag.VERSION)
                for value, group in zip(values, self.groups, strict=True)
            ]
        return np.array(values, dtype=np.int64)

    def numbers(self, name: str) -> Floats:
        """Return a numeric tag per sample as (n, size), with NaN for None; TagError if it is missing."""
        if name not in self._numbers:
            try:
                rows = [group.tags[name] for group in self.groups]
            except KeyError:
                rows = [group.group_tag(name) for group in self.groups]
            try:
                # NumPy would take the text "1" for a number.
                if str in set(map(type, chain.from_iterable(rows))):
                    raise TypeError
                flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=self.n * self.size)
            except (TypeError, ValueError, OverflowError):
                flat = np.array(
                    [
                        _number(key, name, value)
                        for group in self.groups
                        for key, value in zip(group.keys, group.sample_tag(name), strict=True)
                    ]
                )
            self._numbers[name] = flat.reshape(self.n, self.size)
        return self._numbers[name]

    def live_numbers(self, name: str) -> Floats:
        """Return `numbers(name)`; TagError if that of a live sample of an open group is not finite."""
        values = self.numbers(name)
        bad = ~np.isfinite(values) & self.live & self.open[:, None]
        if bad.any():
            i, j = np.argwhere(bad)[0]
            group = self.groups[int(i)]
            value = group.sample_tag(name)[int(j)]
            raise TagError(f"{group.keys[int(j)]}: tag {name!r} is {value!r}; it must be a finite number")
        return values

    def live_extremes(self, values: Floats) -> tuple[Floats, Floats]:
        """Return smallest and largest of `values` over the live samples of each group (inf, -inf without any)."""
        low = np.where(self.live, values, np.inf).min(axis=1)
        high = np.where(self.live, values, -np.inf).max(axis=1)
        return low, high

    def live_means(self, values: Floats) -> Floats:
        """Return the mean of `values` over the live samples of each group (NaN without any)."""
        counts = self.live.sum(axis=1)
        sums = np.where(self.live, values, 0.0).sum(axis=1)
        means: Floats = np.divide(sums, counts, out=np.full(self.n, np.nan), where=counts > 0)
        return means

    def _finished(self) -> Flags:
        rows = [group.tags.get(tag.STATUS) or group.sample_tag(tag.STATUS) for group in self.groups]
        flags = np.ones((self.n, self.size), dtype=np.bool_)
        for i, row in enumerate(rows):
            if tag.FAILED in row:
                flags[i] = [status != tag.FAILED for status in row]
        return flags


def _number(key: str, name: str, value: Any) -> float:
    if value is None:
        return np.nan
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise TagError(f"{key}: tag {name!r} is {value!r}; it must be a finite number")


@dataclass(frozen=True, slots=True)
class ColumnVerdict:
    """Verdicts on many groups: by reason, which groups to drop (n), and which samples to mask (n, size).

    A mask is a pair: the flags, and whether the masked samples keep their reward. All other groups are kept.
    """

    drops: Mapping[str, Flags] = field(default_factory=dict)
    masks: Mapping[str, tuple[Flags, bool]] = field(default_factory=dict)
