"""The event log's types: one JSON object a line, tagged by `type`.

`seq` is monotonic, `t` seconds since the run began (the run's own clock), `wall` Unix time.
Keys, groups and versions are those of the data plane.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

SCHEMA = 1


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all events; the log fills in `seq`, `t` and `wall`."""

    seq: int = 0
    t: float = 0.0
    wall: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    schema: int
    config: dict[str, Any]
    software: dict[str, str]


class Dispatched(Event, frozen=True, kw_only=True, tag="dispatched"):
    """A group was granted. `retry_of` is the group whose prompt this issues again."""

    group: int
    prompt: int
    dataset: str
    size: int
    collector: str
    seed: int = 0
    retry_of: int | None = None


class Put(Event, frozen=True, kw_only=True, tag="put"):
    """A whole group is in the data plane, with the tags as the front end will see them."""

    group: int
    keys: list[str]
    tags: dict[str, Any]


class GroupFailed(Event, frozen=True, kw_only=True, tag="group_failed"):
    group: int
    reason: str
    error: str


class Claimed(Event, frozen=True, kw_only=True, tag="claimed"):
    claim: str
    fence: int
    groups: list[int]


class Judged(Event, frozen=True, kw_only=True, tag="judged"):
    """The verdict on one group of a batch: kept (`dropped` is null), or dropped for a reason by a filter."""

    group: int
    batch: int
    age: int
    dropped: str | None
    by: str
    masked: dict[int, str]


class BatchJudged(Event, frozen=True, kw_only=True, tag="batch_judged"):
    """A batch is complete. Rewards are of all its samples that have a finite one, before any filter."""

    batch: int
    judged: int
    kept: int
    attempts: int
    reward_sum: float
    reward_count: int


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """Per rank, per micro-batch: keys. Fillers repeat a key with weight zero."""

    batch: int
    step: int
    ranks: list[list[list[str]]]
    fillers: int


class StepStarted(Event, frozen=True, kw_only=True, tag="step_started"):
    step: int
    version: int
    groups: list[int]


class StepEnded(Event, frozen=True, kw_only=True, tag="step_ended"):
    """V is now `version`. `ages` counts trained samples by age, as strings of versions."""

    step: int
    version: int
    seconds: float
    ages: dict[str, int]
    samples: int
    tokens: int
    reward_sum: float
    metrics: dict[str, float]


class PublishStarted(Event, frozen=True, kw_only=True, tag="publish_started"):
    version: int


class PublishFailed(Event, frozen=True, kw_only=True, tag="publish_failed"):
    version: int
    error: str


class Acknowledged(Event, frozen=True, kw_only=True, tag="acknowledged"):
    generator: str
    version: int


class Published(Event, frozen=True, kw_only=True, tag="published"):
    version: int
    seconds: float


class Settled(Event, frozen=True, kw_only=True, tag="settled"):
    """The one fate of each sample of a group, in the order of its indexes."""

    group: int
    fates: list[str]


class Released(Event, frozen=True, kw_only=True, tag="released"):
    """Capacity of groups came back to run-ahead."""

    groups: list[int]


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    code: int
    reason: str


AnyEvent = (
    RunStarted
    | Dispatched
    | Put
    | GroupFailed
    | Claimed
    | Judged
    | BatchJudged
    | Planned
    | StepStarted
    | StepEnded
    | PublishStarted
    | PublishFailed
    | Acknowledged
    | Published
    | Settled
    | Released
    | RunEnded
)


def written(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags in their written form: JSON has no NaN or infinity, so those become {"float": name}."""
    return {name: _written(value) for name, value in tags.items()}


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return value


def unwritten(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `written`."""
    return {name: _unwritten(value) for name, value in tags.items()}


def _unwritten(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    if isinstance(value, list):
        return [_unwritten(item) for item in value]
    return value
