"""Finds out from a log whether generators decode one batch after another, and how long each batch took."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.configs import RunConfig
from asyncrl.engine.simulate.observed import Observed, ObservedGroup
from asyncrl.engine.simulate.profile import Rollout

# Groups that were dispatched within this time were dispatched together.
_TOGETHER_S = 0.02
# Above this share of groups in the order of their dispatch, a generator decodes one batch after another.
_IN_ORDER = 0.9
# Groups dispatched together are one decode batch if the deviation of their seconds over the mean is below this.
_SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One batch of a generator, from `start_t` to `end_t` on the run's clock."""

    collector: str
    start_t: float
    end_t: float
    groups: tuple[int, ...]


def bursts(seen: Observed) -> list[list[Rollout]]:
    """Return the finished groups, in order, by which of them were dispatched together to one collector."""
    granted_to = defaultdict(list)
    for event in seen.granted.values():
        granted_to[event.collector].append(event)
    found: list[tuple[float, list[Rollout]]] = []
    for granted in granted_to.values():
        last = float("-inf")
        for event in granted:
            if event.t - last > _TOGETHER_S:
                found.append((event.t, []))
            last = event.t
            if event.group in seen.groups:
                found[-1][1].append(seen.groups[event.group].rollout)
    return [rollouts for _, rollouts in sorted(found, key=lambda burst: burst[0]) if rollouts]


def groups_at_once(config: RunConfig) -> int:
    """Return how many groups a generator takes into one decode batch.

    At `max_staleness` 0 they are those that were granted together; the engine `batch` then takes one alone.
    """
    if config.rollout.max_staleness == 0:
        return 1 if config.collector.engine == "batch" else config.rollout.groups_per_step
    return config.collector.decode_samples // config.rollout.group_size


def may_be_batched(config: RunConfig) -> bool:
    """Return whether groups may wait for a decode batch to end: always for the engine `batch`.

    Any other engine begins a group at once while it has rows to spare. Where run-ahead fills them, groups that take
    about as long end together too, and the next ones wait for that.
    """
    rows = config.collector.decode_samples * config.collector.count
    return config.collector.engine == "batch" or config.run_ahead_groups * config.rollout.group_size >= rows


def loads_beside(config: RunConfig) -> bool:
    """Return whether weights load while an engine decodes; those of the engine `batch` wait until a batch has ended."""
    return config.collector.engine != "batch"


def is_batched(seen: Observed, *, at_once: int) -> bool:
    """Return whether groups finish in the order of their dispatch, those of one decode batch together."""
    return _in_order(seen.groups.values()) > _IN_ORDER and _spread(bursts(seen), at_once) < _SPREAD


def _in_order(groups: Iterable[ObservedGroup]) -> float:
    """Return the share of groups that were dispatched after, or together with, every group put before them."""
    newest: dict[str, float] = defaultdict(float)
    right = count = 0
    for group in groups:
        count += 1
        right += group.granted_t > newest[group.collector] - _TOGETHER_S
        newest[group.collector] = max(group.granted_t, newest[group.collector])
    return right / count


def _spread(granted: Sequence[Sequence[Rollout]], at_once: int) -> float:
    """Return the median, over bursts that fit one decode batch, of the deviation of the seconds over their mean."""
    seconds = [[rollout.seconds for rollout in burst] for burst in granted if 1 < len(burst) <= at_once]
    spreads = [float(np.std(burst) / np.mean(burst)) for burst in seconds if np.mean(burst) > 0]
    return float(np.median(spreads)) if spreads else 1.0


def decode_batches(seen: Observed, *, at_once: int, beside: bool = False) -> list[DecodeBatch]:
    """Return the decode batches of all generators, in order of their start.

    A free generator takes up to `at_once` of the groups that wait. A batch ends when its first group is put. Unless
    weights load `beside`, they do between two batches: a publish that was waiting comes before the next batch.
    """
    waiting: dict[str, list[ObservedGroup]] = defaultdict(list)
    for number in sorted(seen.groups):
        waiting[seen.groups[number].collector].append(seen.groups[number])
    batches: list[DecodeBatch] = []
    for name, groups in waiting.items():
        at, free = 0, 0.0
        while at < len(groups):
            start = max(free, groups[at].granted_t)
            batch = [group for group in groups[at : at + at_once] if group.granted_t <= start + _TOGETHER_S]
            end = max(start, min(group.put_t for group in batch))
            if not beside:
                start = max([start, *(t for began, t in seen.loads[name] if began < start < t < end)])
            batches.append(DecodeBatch(name, start, end, tuple(group.number for group in batch)))
            at, free = at + len(batch), end
    return sorted(batches, key=lambda batch: batch.start_t)


def publish_seconds(seen: Observed, batches: Sequence[DecodeBatch]) -> list[float]:
    """Return the seconds of each publish without the wait for the batches that ran when it began."""
    of: dict[str, list[DecodeBatch]] = defaultdict(list)
    for batch in batches:
        of[batch.collector].append(batch)
    return [
        max(max(0.0, began + seconds - _free(began, served)) for served in of.values())
        for began, seconds in seen.publishes
    ]


def _free(t: float, batches: Sequence[DecodeBatch]) -> float:
    """Return when a generator was free to load weights that arrived at `t`."""
    last = bisect_right(batches, t, key=lambda batch: batch.start_t) - 1
    return max(t, batches[last].end_t) if last >= 0 else t
