"""Groups, steps and overheads of a recorded run. A fold over its events.

An overhead is the time between two events of which the second waits for nothing but the first.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.configs import RunConfig
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
    StepEnded,
    StepStarted,
    unwritten,
)
from asyncrl.engine.records import group as tag
from asyncrl.engine.simulate.profile import Rollout

_NEEDED_TAGS = frozenset(
    {tag.VERSION, tag.PROMPT_TOKENS, tag.RESPONSE_TOKENS, tag.REWARD, tag.STATUS},
)
_KNOWN_TAGS = _NEEDED_TAGS | {
    tag.GROUP,
    tag.PROMPT,
    tag.DATASET,
    tag.END_VERSION,
    tag.TRAINABLE_TOKENS,
    tag.CAUSE,
    "spans",
}


@dataclass(slots=True)
class ObservedGroup:
    """A finished group: dispatched at `granted_t`, put at `put_t`, in seconds of the run's clock."""

    number: int
    prompt: int
    version: int
    collector: str
    granted_t: float
    put_t: float
    rollout: Rollout


class Observed:
    """`steps` are pairs (trained tokens per rank, seconds); `publishes` are (start, seconds).

    `loads` are, by generator, (start of the publish, weights loaded); `overheads` are seconds by kind, in order.
    """

    def __init__(self, config: RunConfig) -> None:
        self.prompts: dict[int, tuple[str, int]] = {}
        self._numbers: dict[str, int] = {}
        self.groups: dict[int, ObservedGroup] = {}
        self.granted: dict[int, Dispatched] = {}
        self.failures = 0
        self.steps: list[tuple[float, float]] = []
        self.publishes: list[tuple[float, float]] = []
        self.loads: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.overheads: dict[str, list[float]] = defaultdict(list)
        self._ranks, self._lag = config.trainer.replicas, config.max_publish_lag
        self._served: dict[str, int] = {}
        self._publish_began = 0.0
        self._version = 0
        self._free_at = self._claimed_at = self._ended_at = self._taken_at = self._lag_ok_at = 0.0

    @property
    def collectors(self) -> int:
        return len({event.collector for event in self.granted.values()})

    def apply(self, event: AnyEvent) -> None:
        self._apply_group(event)
        self._apply_step(event)

    def take_batches_out(self, batch_ends: Mapping[int, float], publishes: Sequence[float]) -> None:
        """Count a group's seconds from its decode batch's end, by group, and publishes without waits for batches."""
        self.overheads["publish"] = list(publishes)
        for number, end in batch_ends.items():
            group = self.groups[number]
            group.rollout.seconds = max(0.0, group.put_t - end)

    def _apply_group(self, event: AnyEvent) -> None:
        match event:
            case Dispatched():
                self.granted[event.group] = event
                self.prompts.setdefault(self._number(event.prompt), (event.dataset, 1))
            case Put():
                self._put(event)
            case GroupFailed():
                self.failures += 1
            case Claimed():
                puts = [self.groups[group].put_t for group in event.groups if group in self.groups]
                self.overheads["claim"].append(max(0.0, event.t - max([self._free_at, *puts])))
                self._claimed_at = event.t

    def _apply_step(self, event: AnyEvent) -> None:
        match event:
            case BatchJudged():
                self.overheads["judge"].append(event.t - self._claimed_at)
                self._free_at = self._taken_at = event.t
            case BatchTaken():
                self._free_at = self._taken_at = event.t
            case StepStarted():
                # A step waits for the lag too, until the acknowledgement that brings it within its bound.
                waited_for = max(self._taken_at, self._lag_ok_at)
                self.overheads["hand_off"].append(max(0.0, event.t - waited_for))
            case StepEnded():
                self._version, self._ended_at = event.version, event.t
                self.steps.append((event.tokens / self._ranks, event.seconds))
            case PublishStarted() if event.version:
                self.overheads["weights"].append(event.t - self._ended_at)
                self._publish_began = event.t
                # Logs of schema 1 do not say when a batch was taken. It was at this moment, or when it was judged.
                self._taken_at = event.t
            case Acknowledged():
                self._served[event.generator] = event.version
                self.loads[event.generator].append((self._publish_began, event.t))
                if self._version - min(self._served.values()) <= self._lag:
                    self._lag_ok_at = event.t
            case Published() if event.version:
                self.publishes.append((event.t - event.seconds, event.seconds))
                # Beside generation a part of it is waiting, which a publish without generation has not.
                work = event.gather_s + event.transfer_s + event.stage_s + event.pause_s
                self.overheads["publish"].append(min(work or event.seconds, event.seconds))

    def _number(self, prompt: int | str) -> int:
        """Return a prompt's id if it is an integer, and a unique negative number if it is a string."""
        return prompt if isinstance(prompt, int) else self._numbers.setdefault(prompt, -1 - len(self._numbers))

    def _put(self, event: Put) -> None:
        tags = unwritten(event.tags)
        lacking = sorted(_NEEDED_TAGS - set(tags))
        if lacking or event.group not in self.granted:
            what = f"tag {lacking[0]!r}" if lacking else "its dispatch"
            raise ConfigError(
                f"event {event.seq}, put of group {event.group}: {what} is missing, so the run cannot be fitted"
            )
        granted = self.granted[event.group]
        rollout = Rollout(
            event.t - granted.t,
            [max(1, n) for n in tags[tag.RESPONSE_TOKENS]],
            [
                None if status == tag.FAILED or reward is None else float(reward)
                for status, reward in zip(tags[tag.STATUS], tags[tag.REWARD], strict=True)
            ],
            tags=_own_tags(tags),
        )
        prompt = self._number(granted.prompt)
        self.prompts[prompt] = (granted.dataset, tags[tag.PROMPT_TOKENS])
        self.groups[event.group] = ObservedGroup(
            event.group, prompt, tags[tag.VERSION], granted.collector, granted.t, event.t, rollout
        )


def _own_tags(tags: Mapping[str, Any]) -> dict[str, Sequence[float | None]]:
    """Return the numeric tags per sample that a task or a tagger added."""
    return {
        name: values
        for name, values in tags.items()
        if name not in _KNOWN_TAGS
        and isinstance(values, list)
        and all(isinstance(v, int | float | None) and not isinstance(v, bool) for v in values)
    }
