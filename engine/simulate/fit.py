"""A profile fitted from a recorded run: it draws what was seen, near where it was seen.

Near in number, so that a slow phase of the run is slow for all its parts. Rewards and lengths of a
group come from one recorded near its version (of the same prompt, where there is one); seconds from
groups that were granted together; a step's from steps of about as many tokens a rank. Where groups
came out in batches, one after the other, generators are queues that serve batches; then a group's
own seconds are those after its batch.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from asyncrl.configs import Override
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    BatchJudged,
    BatchTaken,
    Claimed,
    Dispatched,
    GroupFailed,
    Published,
    PublishStarted,
    Put,
    RunStarted,
    StepEnded,
    StepStarted,
    unwritten,
)
from asyncrl.engine.records import Prompt
from asyncrl.engine.records import group as tag
from asyncrl.engine.simulate.profile import Burst, Rollout

# How many recorded groups, or events of any other kind, count as near; and, of those, as alike in size.
NEAR_GROUPS = 64
NEAR = 48
ALIKE = 12

# Groups that were granted within this of each other were granted together.
_TOGETHER_S = 0.02
# From this share of groups in the order of their dispatch on, a generator decodes one batch after another.
_IN_ORDER = 0.9
# Up to this spread, over their mean, of the seconds of groups granted together, they are of one decode batch.
_TOGETHER = 0.2
# From this correlation on, a group's seconds go with its length.
_CORRELATED = 0.3

_KNOWN_TAGS = frozenset(
    {
        tag.GROUP,
        tag.PROMPT,
        tag.DATASET,
        tag.VERSION,
        tag.END_VERSION,
        tag.PROMPT_TOKENS,
        tag.RESPONSE_TOKENS,
        tag.TRAINABLE_TOKENS,
        tag.REWARD,
        tag.STATUS,
        tag.CAUSE,
        "spans",
    }
)


Value = TypeVar("Value")


@dataclass(slots=True)
class _Group:
    prompt: int
    version: int
    rollout: Rollout


def recorded_values(started: RunStarted, source: str) -> list[Override]:
    """Return the configuration of a recorded run as overrides that say where they are from."""
    out = []
    for section, fields in started.config.items():
        named = fields.items() if isinstance(fields, dict) else [("", fields)]
        out += [Override(f"{section}.{name}" if name else section, value, source) for name, value in named]
    return out


class Fitted:
    """The profile. ConfigError for a run with no group or no step to learn from."""

    def __init__(self, events: Iterable[AnyEvent], *, source: str = "the run") -> None:
        seen = _Reader()
        for event in events:
            seen.read(event)
        if not seen.groups or not seen.steps:
            raise ConfigError(
                f"{source} has {len(seen.groups)} groups and {len(seen.steps)} steps; a fit needs some of both"
            )
        self._groups = sorted(seen.groups, key=lambda group: group.version)
        self._versions = [group.version for group in self._groups]
        self._failed_share = seen.failures / (seen.failures + len(seen.groups))
        self.batched = seen.in_order > _IN_ORDER and seen.spread < _TOGETHER
        self._batches: list[tuple[float, float]] = []
        if self.batched:
            self._batches = seen.serve()
        self._first_burst, *bursts = [[rollout.seconds for rollout in burst] for burst in seen.bursts()]
        self._bursts = bursts or [self._first_burst]
        self._steps = seen.steps
        self._collectors = len(seen.collectors)
        self._prompts = seen.prompts
        self._overheads = seen.overheads
        self._by_length = _go_together(self._groups)

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(id=i, text=str(i), answer="", dataset=dataset) for i, (dataset, _) in sorted(self._prompts.items())
        ]

    def prompt_tokens(self, prompt: int) -> int:
        return self._prompts[prompt][1]

    def batch_seconds(self, rng: np.random.Generator, *, number: int, groups: int) -> float:
        """Draw from recorded batches of about as many groups; nothing is said of sizes that were not seen."""
        return _drawn(rng, _alike(_near(self._batches, (number - 1) * self._collectors), groups))[1]

    def group(self, rng: np.random.Generator, *, prompt: int, version: int, size: int, burst: Burst) -> Rollout:
        near = self._near_version(version)
        same = [group for group in near if group.prompt == prompt] or near
        drawn = same[int(rng.integers(len(same)))].rollout
        failed = bool(rng.random() < self._failed_share)
        seconds = drawn.seconds if self._by_length else self._together(burst)
        return Rollout(
            seconds,
            _of_size(drawn.response_tokens, size),
            _of_size(drawn.rewards, size),
            failed,
            {name: _of_size(values, size) for name, values in drawn.tags.items()},
        )

    def step_seconds(self, rng: np.random.Generator, *, step: int, tokens_per_rank: float) -> float:
        return _drawn(rng, _alike(_near(self._steps, step - 1), tokens_per_rank))[1]

    def overhead(self, rng: np.random.Generator, kind: str, number: int) -> float:
        return _drawn(rng, _near(self._overheads[kind], number - 1)) if self._overheads[kind] else 0.0

    def _near_version(self, version: int) -> Sequence[_Group]:
        first = max(0, min(bisect_left(self._versions, version) - NEAR_GROUPS // 4, len(self._groups) - NEAR_GROUPS))
        return self._groups[first : first + NEAR_GROUPS]

    def _together(self, burst: Burst) -> float:
        """Return the seconds of the group at this place of a recorded burst, the same for all of one burst."""
        if burst.number == 0:
            return self._first_burst[burst.place % len(self._first_burst)]
        near = _near(self._bursts, (burst.number - 1) * self._collectors)
        recorded = near[int(burst.draw * len(near))]
        return recorded[burst.place % len(recorded)]


def _near(values: Sequence[Value], number: int) -> Sequence[Value]:
    """Return the values about the `number`-th, or the last ones."""
    first = max(0, min(number - NEAR // 2, len(values) - NEAR))
    return values[first : first + NEAR]


def _alike(values: Sequence[tuple[float, float]], size: float) -> Sequence[tuple[float, float]]:
    """Return those whose size is nearest."""
    return sorted(values, key=lambda value: abs(value[0] - size))[:ALIKE]


def _drawn(rng: np.random.Generator, values: Sequence[Value]) -> Value:
    return values[int(rng.integers(len(values)))]


def _of_size(values: Sequence[Any], size: int) -> list[Any]:
    return [values[i % len(values)] for i in range(size)]


def _go_together(groups: Sequence[_Group]) -> bool:
    """Say whether a group's seconds go with its length."""
    seconds = [group.rollout.seconds for group in groups]
    lengths = [float(np.mean(group.rollout.response_tokens)) for group in groups]
    if np.std(seconds) == 0 or np.std(lengths) == 0:
        return False
    return float(np.corrcoef(seconds, lengths)[0, 1]) > _CORRELATED


class _Reader:
    """Reads events in order. Overheads are what lies between two events that waits for nothing else."""

    def __init__(self) -> None:
        self.prompts: dict[int, tuple[str, int]] = {}
        self.groups: list[_Group] = []
        self.failures = 0
        self.steps: list[tuple[float, float]] = []
        self.overheads: dict[str, list[float]] = defaultdict(list)
        self._ranks, self._lag, self._at_once = 1, 0, 1
        self._publishes: list[tuple[float, float]] = []
        self._granted: dict[int, Dispatched] = {}
        self._rollouts: dict[int, Rollout] = {}
        self._put_at: dict[int, float] = {}
        self._served: dict[str, int] = {}
        self._loads: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._publish_began = 0.0
        self._version = 0
        self._free_at = self._claimed_at = self._ended_at = self._taken_at = self._lag_ok_at = 0.0

    def read(self, event: AnyEvent) -> None:
        self._read_group(event)
        self._read_step(event)

    def _read_group(self, event: AnyEvent) -> None:
        match event:
            case Dispatched():
                self._granted[event.group] = event
                self.prompts.setdefault(event.prompt, (event.dataset, 1))
            case Put():
                self._put(event)
            case GroupFailed():
                self.failures += 1
            case Claimed():
                ready = max([self._free_at, *(self._put_at.get(group, 0.0) for group in event.groups)])
                self.overheads["claim"].append(max(0.0, event.t - ready))
                self._claimed_at = event.t

    def _read_step(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self._ranks = event.config["trainer"]["ranks"]
                rollout = event.config["rollout"]
                if rollout["max_staleness"]:
                    self._at_once = max(1, event.config["collector"]["decode_samples"] // rollout["group_size"])
                lag = rollout["max_publish_lag"]
                self._lag = min(1, rollout["max_staleness"]) if lag is None else lag
            case BatchJudged():
                self.overheads["judge"].append(event.t - self._claimed_at)
                self._free_at = self._taken_at = event.t
            case BatchTaken():
                self._free_at = self._taken_at = event.t
            case StepStarted():
                self._step(event)
            case StepEnded():
                self._version, self._ended_at = event.version, event.t
                self.steps.append((event.tokens / self._ranks, event.seconds))
            case PublishStarted() if event.version:
                self.overheads["weights"].append(event.t - self._ended_at)
                self._publish_began = event.t
                # Logs of schema 1 do not say when a batch was taken: at this moment, or when it was judged.
                self._taken_at = event.t
            case Acknowledged():
                self._served[event.generator] = event.version
                self._loads[event.generator].append((self._publish_began, event.t))
                if self._version - min(self._served.values()) <= self._lag:
                    self._lag_ok_at = event.t
            case Published() if event.version:
                self._publishes.append((event.t - event.seconds, event.seconds))
                self.overheads["publish"].append(event.seconds)

    def _step(self, event: StepStarted) -> None:
        """The lag was within its bound from the last acknowledgement that brought it there, or all along."""
        waited_for = self._taken_at
        if self._taken_at < self._lag_ok_at:
            waited_for = self._lag_ok_at
        self.overheads["hand_off"].append(max(0.0, event.t - waited_for))

    def _put(self, event: Put) -> None:
        granted = self._granted[event.group]
        self._put_at[event.group] = event.t
        tags = unwritten(event.tags)
        tokens = list(tags[tag.RESPONSE_TOKENS])
        seconds = event.t - granted.t
        rollout = Rollout(
            seconds,
            [max(1, n) for n in tokens],
            [
                None if status == tag.FAILED or reward is None else float(reward)
                for status, reward in zip(tags[tag.STATUS], tags[tag.REWARD], strict=True)
            ],
            tags=_own_tags(tags),
        )
        self._rollouts[event.group] = rollout
        self.prompts[granted.prompt] = (granted.dataset, tags[tag.PROMPT_TOKENS])
        self.groups.append(_Group(granted.prompt, tags[tag.VERSION], rollout))

    @property
    def collectors(self) -> set[str]:
        return {event.collector for event in self._granted.values()}

    @property
    def in_order(self) -> float:
        """The share of groups that were put before every group granted later, not together with it, by collector."""
        newest: dict[str, float] = defaultdict(float)
        right = 0
        for group in self._put_at:
            granted = self._granted[group]
            right += granted.t > newest[granted.collector] - _TOGETHER_S
            newest[granted.collector] = max(granted.t, newest[granted.collector])
        return right / len(self._put_at)

    @property
    def spread(self) -> float:
        """The median, over bursts that fit one decode batch, of the standard deviation of seconds over their mean."""
        bursts = [[rollout.seconds for rollout in burst] for burst in self.bursts()]
        small = [burst for burst in bursts if 1 < len(burst) <= self._at_once and np.mean(burst) > 0]
        return float(np.median([np.std(burst) / np.mean(burst) for burst in small])) if small else 1.0

    def serve(self) -> list[tuple[float, float]]:
        """Work out decode batches, as (groups, seconds); what a group and a publish took is then without them.

        A generator takes what waits, up to `decode_samples`, when it is free; a batch has ended when its
        first group is put.
        """
        ends: dict[str, list[tuple[float, float]]] = defaultdict(list)
        batches: list[tuple[float, tuple[float, float]]] = []
        by_collector: dict[str, list[int]] = defaultdict(list)
        for group in sorted(self._put_at):
            by_collector[self._granted[group].collector].append(group)
        for name, waiting in by_collector.items():
            at, free = 0, 0.0
            while at < len(waiting):
                start = max(free, self._granted[waiting[at]].t)
                batch = [g for g in waiting[at : at + self._at_once] if self._granted[g].t <= start + _TOGETHER_S]
                end = max(start, min(self._put_at[group] for group in batch))
                # Weights load between two batches: a publish that waited already came before this one.
                start = max([start, *(t for began, t in self._loads[name] if began < start < t < end)])
                free = end
                for group in batch:
                    self._rollouts[group].seconds = max(0.0, self._put_at[group] - free)
                batches.append((start, (len(batch), free - start)))
                ends[name].append((start, free))
                at += len(batch)
        self._without_batches(ends)
        return [batch for _, batch in sorted(batches)]

    def _without_batches(self, ends: Mapping[str, list[tuple[float, float]]]) -> None:
        """Take from each publish what it waited for the batch that ran when it began."""
        self.overheads["publish"] = [
            max(
                max(0.0, began + seconds - max([began, *(end for start, end in served if start <= began < end)]))
                for served in ends.values()
            )
            for began, seconds in self._publishes
        ]

    def bursts(self) -> list[list[Rollout]]:
        """Return the groups that came through by what was granted together, in order."""
        by_collector: dict[str, list[Dispatched]] = defaultdict(list)
        for event in self._granted.values():
            by_collector[event.collector].append(event)
        bursts: list[tuple[float, list[Rollout]]] = []
        for granted in by_collector.values():
            last = -1.0
            for event in granted:
                if event.t - last > _TOGETHER_S or not bursts:
                    bursts.append((event.t, []))
                last = event.t
                if event.group in self._rollouts:
                    bursts[-1][1].append(self._rollouts[event.group])
        return [rollouts for _, rollouts in sorted(bursts, key=lambda burst: burst[0]) if rollouts]


def _own_tags(tags: Mapping[str, Any]) -> dict[str, Sequence[float | None]]:
    """Return the numeric per-sample tags that a task or a tagger added."""
    return {
        name: values
        for name, values in tags.items()
        if name not in _KNOWN_TAGS
        and isinstance(values, list)
        and all(isinstance(v, int | float | None) and not isinstance(v, bool) for v in values)
    }
