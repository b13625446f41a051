"""A profile fitted from a recorded run: it draws what was seen, near where it was seen.

Rewards and lengths of a group come from one recorded near its version (of the same prompt, where
there is one); seconds from groups that were granted together, since they decode together; a step's
seconds from steps of about as many tokens a rank.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from asyncrl.engine.simulate.durations import Recorded
from asyncrl.engine.simulate.profile import Burst, Rollout

# How many recorded groups, and steps, count as near.
NEAR_GROUPS = 64
NEAR_STEPS = 16

# Groups that were granted within this of each other were granted together.
_TOGETHER_S = 0.02
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
        self._first_burst, *bursts = [[rollout.seconds for rollout in burst] for burst in seen.bursts()]
        self._bursts = bursts or [self._first_burst]
        self._steps = sorted(seen.steps)
        self._prompts = seen.prompts
        self._overheads = {kind: Recorded(values) for kind, values in seen.overheads.items()}
        self._by_length = _go_together(self._groups)

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [
            Prompt(id=i, text=str(i), answer="", dataset=dataset) for i, (dataset, _) in sorted(self._prompts.items())
        ]

    def prompt_tokens(self, prompt: int) -> int:
        return self._prompts[prompt][1]

    def group(self, rng: np.random.Generator, *, prompt: int, version: int, size: int, burst: Burst) -> Rollout:
        near = self._near(version)
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

    def step_seconds(self, rng: np.random.Generator, *, tokens_per_rank: float) -> float:
        at = bisect_left(self._steps, (tokens_per_rank, 0.0))
        first = max(0, min(at - NEAR_STEPS // 2, len(self._steps) - NEAR_STEPS))
        near = self._steps[first : first + NEAR_STEPS]
        return near[int(rng.integers(len(near)))][1]

    def overhead(self, rng: np.random.Generator, kind: str) -> float:
        return self._overheads[kind].draw(rng) if kind in self._overheads else 0.0

    def _near(self, version: int) -> Sequence[_Group]:
        middle = bisect_left(self._versions, version)
        first = max(0, min(middle - NEAR_GROUPS // 4, len(self._groups) - NEAR_GROUPS))
        return self._groups[first : first + NEAR_GROUPS]

    def _together(self, burst: Burst) -> float:
        """Return the seconds of the group at this place of a recorded burst, the same for all of one burst."""
        if burst.number == 0:
            return self._first_burst[burst.place % len(self._first_burst)]
        recorded = self._bursts[int(burst.draw * len(self._bursts))]
        return recorded[burst.place % len(recorded)]


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
        self._ranks, self._lag = 1, 0
        self._granted: dict[int, Dispatched] = {}
        self._rollouts: dict[int, Rollout] = {}
        self._put_at: dict[int, float] = {}
        self._served: dict[str, int] = {}
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
                # Logs of schema 1 do not say when a batch was taken: at this moment, or when it was judged.
                self._taken_at = event.t
            case Acknowledged():
                self._served[event.generator] = event.version
                if self._version - min(self._served.values()) <= self._lag:
                    self._lag_ok_at = event.t
            case Published() if event.version:
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
