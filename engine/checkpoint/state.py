"""What the loop knows at the cut of a checkpoint, as plain values, and its written form.

Tags, rewards and the states of filters may hold NaN, which Python's JSON writes and reads; prompts keep the kind of
their ids, so that 1 and "1" stay two.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.engine.errors import CheckpointBroken
from asyncrl.engine.records import Grant, GroupMeta, Prompt

Place = Literal["in_flight", "buffered", "claimed"]
_Kind = TypeVar("_Kind")


class PromptState(msgspec.Struct, frozen=True):
    id: int | str
    text: str
    answer: str
    dataset: str
    fields: dict[str, Any]

    def prompt(self) -> Prompt:
        return Prompt(self.id, self.text, self.answer, self.dataset, self.fields)


class GrantState(msgspec.Struct, frozen=True):
    group: int
    prompt: PromptState
    size: int
    seed: int
    tries: int

    @classmethod
    def of(cls, grant: Grant) -> "GrantState":
        prompt = grant.prompt
        told = PromptState(prompt.id, prompt.text, prompt.answer, prompt.dataset, dict(prompt.fields))
        return cls(grant.group, told, grant.size, grant.seed, grant.tries)

    def grant(self, prompt: Prompt) -> Grant:
        return Grant(self.group, prompt, self.size, self.seed, self.tries)


class GroupState(msgspec.Struct, frozen=True):
    """A group without a fate. `keys` and `tags` are those of its row, if it has arrived."""

    grant: GrantState
    place: Place
    keys: list[str] = []
    tags: dict[str, Any] = {}

    @property
    def meta(self) -> GroupMeta:
        return GroupMeta(tuple(self.keys), self.tags)


class JudgementState(msgspec.Struct, frozen=True):
    """The verdict on a group that a batch keeps."""

    group: int
    by: str
    masked: dict[int, str]
    live: list[int]
    trained: list[int]
    rescued: list[str]


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is not trained: in the making, waiting for the trainer, or given up (Batch has the fields)."""

    index: int
    judged: list[int]
    kept: list[JudgementState]
    drops: dict[str, int]
    masked: dict[str, int]
    trained: bool | None
    reward_sum: float
    reward_count: int
    partial: bool
    gate_overdue: bool


class FrontEndState(msgspec.Struct, frozen=True):
    """`open` is the batch in the making, or complete and not taken; `handed_on` those that the refill counts."""

    batches: int
    open: BatchState | None
    handed_on: list[BatchState]

    @property
    def judged(self) -> set[int]:
        """The groups that have a verdict."""
        batches = [*self.handed_on, *([] if self.open is None else [self.open])]
        return {group for batch in batches for group in batch.judged}


class PromptsState(msgspec.Struct, frozen=True):
    """The place in the data of `count` prompts, and the lost prompts that come again."""

    count: int
    stream: dict[str, Any]
    lost: list[GrantState]


class RetirementState(msgspec.Struct, frozen=True):
    """Failures and passes by prompt, as pairs, since an id may be a number."""

    failures: list[tuple[int | str, int]]
    retired: list[tuple[int | str, int]]
    last: str


class CoreState(msgspec.Struct, frozen=True):
    """`out` are the groups whose capacity is out; `unpublished` the groups of batches trained, by version."""

    version: int
    groups: list[GroupState]
    out: list[int]
    unpublished: dict[int, list[int]]
    front_end: FrontEndState
    statistics: dict[str, Any]
    filters: dict[str, dict[str, Any]]
    filter_stats: dict[str, dict[str, Any]]


class RunState(msgspec.Struct, frozen=True):
    """`next_group` is the number of the next group; `turns` counts the grants of each collector."""

    core: CoreState
    prompts: PromptsState
    retirement: RetirementState
    next_group: int
    turns: dict[str, int]


def write_state(state: RunState) -> str:
    """Return the written form; TypeError if a filter's state or a prompt holds what JSON cannot."""
    return json.dumps(msgspec.to_builtins(state, str_keys=True))


def read_state(text: str) -> RunState:
    """Read what `write_state` returned; CheckpointBroken for anything else."""
    return _read(text, RunState)


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the run, its SHA-256, and what it ran under."""

    config: dict[str, Any]
    config_digest: str
    software: dict[str, str]


def write_run(config: Mapping[str, Any], *, digest: str, software: Mapping[str, str]) -> str:
    run = RunFile(config=dict(config), config_digest=digest, software=dict(software))
    return json.dumps(msgspec.to_builtins(run))


def read_run(text: str) -> RunFile:
    """Read what `write_run` returned; CheckpointBroken for anything else."""
    return _read(text, RunFile)


def _read(text: str, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(json.loads(text), kind, str_keys=True)
    except (ValueError, RecursionError) as error:  # msgspec's ValidationError is a ValueError too.
        raise CheckpointBroken(f"it cannot be read as a {kind.__name__}: {error}") from error
