"""The base class of filters, which judge a group by its tags.

Invariant: a filter sees tags only, never a tensor, and cannot change a tag, reorder keys or split a group.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from asyncrl.engine.errors import FilterError, TagError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.group import FAILED, is_live_reward
from asyncrl.filters.columns import ColumnVerdict, GroupColumns
from asyncrl.filters.statistics import RunningStatistics
from asyncrl.filters.taggers import Tagger
from asyncrl.filters.verdict import Verdict

CLAIM = "claim"
AFTER_LOGPROBS = "after_logprobs"


@dataclass(frozen=True, slots=True)
class FilterContext:
    """Where a group is judged: `trainer_version` is V, the version at which its batch will be trained.

    `step` counts the batches trained before this one, and so is V too: the step that trains the batch, and
    makes V + 1, is step V + 1 in logs and views. `statistics` tells what the run has seen before.
    """

    trainer_version: int
    step: int
    seed: int
    statistics: RunningStatistics = field(default_factory=RunningStatistics)

    def rng(self, group: "GroupView") -> random.Random:
        """Return a random generator that depends only on (seed, step, group)."""
        return random.Random(f"{self.seed}/{self.step}/{group.group}")


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as a filter sees it: read-only tags, and which samples are live.

    `live` holds the indexes of the samples whose reward counts: generated, with a finite reward, not masked without
    its reward, and with a token to train (or masked with its reward kept). `trained` holds the indexes of those that
    would be trained if no further filter acted. In a group of 4 where sample 0 failed and sample 2 was masked with
    its reward kept, `live` is (1, 2, 3) and `trained` is (1, 3).
    """

    meta: GroupMeta
    live: tuple[int, ...]
    trained: tuple[int, ...]

    @classmethod
    def of(cls, meta: GroupMeta) -> "GroupView":
        """View a group as it was claimed, before any filter."""
        finished = [i for i, status in enumerate(meta.statuses) if status != FAILED]
        live = tuple(i for i in finished if is_live_reward(meta.rewards[i]) and meta.trainable_tokens[i] > 0)
        frozen = {name: tuple(v) if isinstance(v, list) else v for name, v in meta.tags.items()}
        return cls(GroupMeta(meta.keys, MappingProxyType(frozen)), live, live)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.meta.keys

    @property
    def group(self) -> int:
        """The group's dispatch number."""
        return self.meta.group

    @property
    def size(self) -> int:
        return self.meta.size

    @property
    def version(self) -> int:
        """The oldest weight version of any token."""
        return self.meta.version

    @property
    def lengths(self) -> tuple[int, ...]:
        """Response tokens of each sample; 0 if it failed."""
        return self.meta.response_tokens

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each sample as the task returned it; may be None, NaN or infinite."""
        return self.meta.rewards

    @property
    def without_reward(self) -> tuple[int, ...]:
        """Indexes of samples that were generated but have no finite reward."""
        return tuple(
            i
            for i, (status, reward) in enumerate(zip(self.meta.statuses, self.rewards, strict=True))
            if status != FAILED and not is_live_reward(reward)
        )

    def tag(self, name: str) -> tuple[Any, ...]:
        """Return a tag per sample; TagError, with key and tag, if it is missing."""
        return self.meta.sample_tag(name)

    def live_values(self, name: str) -> list[float]:
        """Return a numeric tag of the live samples; TagError if one of them is not a finite number."""
        values = self.tag(name)
        for i in self.live:
            if isinstance(values[i], str) or not is_live_reward(values[i]):
                raise TagError(f"{self.keys[i]}: tag {name!r} is {values[i]!r}; it must be a finite number")
        return [float(values[i]) for i in self.live]


class BaseRolloutFilter(ABC):
    """Judges groups. Subclass it, write `judge`, and name it in YAML or with `--filter module:Class`.

    `stage` says when: at the claim, or `after_logprobs`, when the tags of records/gaps.py exist.
    `requires` lists the tags that must exist; they are checked before the first verdict. `taggers`
    are functions that the collector runs on each response's tokens; each writes the tag it is
    listed under. `drop_reasons` and `mask_reasons` list the reasons that it may give: they are then in the
    metrics from the first step, at zero, and in `asyncrl filters show`; others show once they occur.
    `age_reasons` lists those of them that are about age: what is dropped or masked for one counts as lost
    to age in the figures of length bias.
    A filter with state overrides `state_dict`, which is written at the end of the run, and
    `load_state_dict`, by which a run is resumed.
    """

    stage: ClassVar[str] = CLAIM
    requires: ClassVar[tuple[str, ...]] = ()
    taggers: ClassVar[Mapping[str, Tagger]] = {}
    drop_reasons: ClassVar[tuple[str, ...]] = ()
    mask_reasons: ClassVar[tuple[str, ...]] = ()
    age_reasons: ClassVar[tuple[str, ...]] = ()

    @property
    def judges_columns(self) -> bool:
        """Whether to call `judge_columns`: it is defined, and no subclass of its class overrides `judge` alone."""
        order = type(self).__mro__
        by_name = {
            name: next(i for i, c in enumerate(order) if name in c.__dict__)
            for name in ("judge_columns", "judge", "judge_many")
        }
        base = order.index(BaseRolloutFilter)
        return by_name["judge_columns"] < base and by_name["judge_columns"] <= min(
            by_name["judge"], by_name["judge_many"]
        )

    @property
    def name(self) -> str:
        """The filter's name in verdicts, counts and errors."""
        return type(self).__name__

    @abstractmethod
    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        """Return keep(), drop(reason), mask(samples, reason, keep_reward=...) or rescue(reasons)."""

    def judge_many(self, groups: Sequence[GroupView], context: FilterContext) -> list[Verdict]:
        """Judge several groups, in order; override it if they must be judged together."""
        return [self.judge(group, context) for group in groups]

    def judge_columns(self, groups: GroupColumns, context: FilterContext) -> ColumnVerdict:
        """Judge many groups in NumPy columns, for speed. Optional; must give the same verdicts as `judge`."""
        raise FilterError(f"filter {self.name} has no judge_columns")

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, as plain JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"filter {self.name} has no state, but was given {sorted(state)}")
