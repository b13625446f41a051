"""A profile fitted to a recorded run: it draws recorded values from near the same position in the run.

So a slow phase of the run is slow in all its parts. What the first step, batch or publish took, with which code is
compiled, only the first one takes. Rewards and lengths of a group come from a group recorded near its version (of the
same prompt if there is one). The seconds of a group come from groups that were dispatched together, and those of a step
from steps with about as many tokens per rank. If groups were finished in batches, one after the other, a generator is a
queue that serves batches, and a group's own seconds are those after its batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import AnyEvent
from asyncrl.engine.records import Prompt
from asyncrl.engine.simulate.decoding import (
    bursts,
    decode_batches,
    groups_at_once,
    is_batched,
    loads_beside,
    may_be_batched,
    publish_seconds,
)
from asyncrl.engine.simulate.observed import Observed, ObservedGroup
from asyncrl.engine.simulate.profile import Burst, Rollout
from asyncrl.engine.trace.recording import Recording

# The number of recorded groups, or of other events, that count as near; and of those, as equal in size.
NEAR_GROUPS = 64
NEAR = 48
ALIKE = 12
# At least so many of the near groups have mixed rewards.
MIXED = 4

# Above this correlation, the seconds of a group are taken to depend on its length.
_CORRELATED = 0.3

Value = TypeVar("Value")


class Fitted:
    """The profile. ConfigError if the run has no group or no step, or lacks parts."""

    def __init__(self, events: Sequence[AnyEvent], *, source: str = "the run") -> None:
        config = Recording(events).config()
        if config.cluster.time_slicing is not None:
            raise ConfigError(
                f"{source} has cluster.time_slicing {config.cluster.time_slicing!r}, and its groups were asleep for "
                "part of their time; a fit needs a run without, and can predict one with it"
            )
        seen = Observed(config)
        try:
            for event in events:
                seen.apply(event)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if not seen.groups or not seen.steps:
            raise ConfigError(
                f"{source} has {len(seen.groups)} groups and {len(seen.steps)} steps; a fit needs some of both"
            )
        self._collectors = seen.collectors
        self._prompts = seen.prompts
        self._steps = seen.steps
        self._overheads = seen.overheads
        self._failed_share = seen.failures / (seen.failures + len(seen.groups))
        at_once = groups_at_once(config)
        self.batched = may_be_batched(config) and is_batched(seen, at_once=at_once)
        beside = loads_beside(config)
        self._batches = self._take_batches_out(seen, at_once, beside=beside) if self.batched else []
        self._first_burst, *later = [[rollout.seconds for rollout in burst] for burst in bursts(seen)]
        self._bursts = later or [self._first_burst]
        self._groups = sorted(seen.groups.values(), key=lambda group: group.version)
        self._versions = [group.version for group in self._groups]
        self._by_length = _go_together(self._groups)
        self._mixed = [0, *accumulate(len(set(group.rollout.rewards)) > 1 for group in self._groups)]
        self._near: dict[int, Sequence[ObservedGroup]] = {}

    @staticmethod
    def _take_batches_out(seen: Observed, at_once: int, *, beside: bool) -> list[tuple[float, float]]:
        """Return decode batches as (groups, seconds), and subtract their time from groups, and publishes that wait."""
        batches = decode_batches(seen, at_once=at_once, beside=beside)
        ends = {number: batch.end_t for batch in batches for number in batch.groups}
        seen.take_batches_out(ends, seen.overheads["publish"] if beside else publish_seconds(seen, batches))
        return [(len(batch.groups), batch.end_t - batch.start_t) for batch in batches]

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(id=i, text=str(i), answer="", dataset=dataset) for i, (dataset, _) in sorted(self._prompts.items())
        ]

    def prompt_tokens(self, prompt: int) -> int:
        return self._prompts[prompt][1]

    def batch_seconds(self, rng: np.random.Generator, *, number: int, groups: int) -> float:
        """Draw from recorded batches of about as many groups; for a size that was not seen, the nearest is taken."""
        near = _near_but_first(self._batches, (number - 1) * self._collectors, firsts=self._collectors)
        return _drawn(rng, _alike(near, groups))[1]

    def group(self, rng: np.random.Generator, *, prompt: int, version: int, size: int, burst: Burst) -> Rollout:
        near = self._near_version(version)
        same = [group for group in near if group.prompt == prompt] or near
        drawn = same[int(rng.integers(len(same)))].rollout
        failed = bool(rng.random() < self._failed_share)
        return Rollout(
            drawn.seconds if self._by_length else self._together(burst),
            _of_size(drawn.response_tokens, size),
            _of_size(drawn.rewards, size),
            failed,
            {name: _of_size(values, size) for name, values in drawn.tags.items()},
        )

    def step_seconds(self, rng: np.random.Generator, *, step: int, tokens_per_rank: float) -> float:
        return _drawn(rng, _alike(_near_but_first(self._steps, step - 1), tokens_per_rank))[1]

    def overhead(self, rng: np.random.Generator, kind: str, number: int) -> float:
        return _drawn(rng, _near_but_first(self._overheads[kind], number - 1)) if self._overheads[kind] else 0.0

    def _near_version(self, version: int) -> Sequence[ObservedGroup]:
        """Return all groups of a version, and groups of versions near it up to `NEAR_GROUPS`.

        All groups: if a run stayed at a version because no group could be trained, the few that ended this are
        among them, and a sample would miss them. And as many more as it takes for `MIXED` with mixed rewards: where
        there is none near, another run would stay for ever.
        """
        if version not in self._near:
            count = len(self._groups)
            first = max(0, min(bisect_left(self._versions, version) - NEAR_GROUPS // 4, count - NEAR_GROUPS))
            end = min(count, max(first + NEAR_GROUPS, bisect_right(self._versions, version)))
            while self._mixed[end] - self._mixed[first] < MIXED and (first > 0 or end < count):
                first, end = max(0, first - 1), min(count, end + 1)
            self._near[version] = self._groups[first:end]
        return self._near[version]

    def _together(self, burst: Burst) -> float:
        """Return the seconds of the group at this place of a recorded burst; one burst uses one recorded burst."""
        if burst.number == 0:
            return self._first_burst[burst.place % len(self._first_burst)]
        near = _near(self._bursts, (burst.number - 1) * self._collectors)
        recorded = near[int(burst.draw * len(near))]
        return recorded[burst.place % len(recorded)]


def _near_but_first(values: Sequence[Value], number: int, *, firsts: int = 1) -> Sequence[Value]:
    """Return the first values for one of these, else those of the others that are near."""
    others = values[firsts:]
    if number < firsts or not others:
        return values[:firsts]
    return _near(others, number - firsts)


def _near(values: Sequence[Value], number: int) -> Sequence[Value]:
    """Return the values around the `number`-th, or the last ones; the nearest come first."""
    first = max(0, min(number - NEAR // 2, len(values) - NEAR))
    places = range(first, min(first + NEAR, len(values)))
    return [values[place] for place in sorted(places, key=lambda place: abs(place - number))]


def _alike(values: Sequence[tuple[float, float]], size: float) -> Sequence[tuple[float, float]]:
    """Return the values whose size is nearest; of those of one size, the first ones."""
    return sorted(values, key=lambda value: abs(value[0] - size))[:ALIKE]


def _drawn(rng: np.random.Generator, values: Sequence[Value]) -> Value:
    return values[int(rng.integers(len(values)))]


def _of_size(values: Sequence[Any], size: int) -> list[Any]:
    return [values[i % len(values)] for i in range(size)]


def _go_together(groups: Sequence[ObservedGroup]) -> bool:
    """Return whether the seconds of a group depend on its length."""
    seconds = [group.rollout.seconds for group in groups]
    lengths = [float(np.mean(group.rollout.response_tokens)) for group in groups]
    if np.std(seconds) == 0 or np.std(lengths) == 0:
        return False
    return float(np.corrcoef(seconds, lengths)[0, 1]) > _CORRELATED
