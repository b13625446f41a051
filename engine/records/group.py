"""A group as everything outside the store sees it: its keys and its tags.

Tags are plain values. A list has one value per sample, in the order of the keys; anything else belongs to the whole
group. A tensor is never a tag.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.engine.errors import TagError

# Names of the tags that every group carries.
GROUP = "group"
PROMPT = "prompt"
DATASET = "dataset"
VERSION = "version"
END_VERSION = "end_version"
PROMPT_TOKENS = "prompt_tokens"
RESPONSE_TOKENS = "response_tokens"
TRAINABLE_TOKENS = "trainable_tokens"
REWARD = "reward"
STATUS = "status"
CAUSE = "cause"
# The number of different responses in the group.
DISTINCT_RESPONSES = "distinct_responses"
# The node on which its row is stored, by address; only where a run is on several nodes, and that is known.
STORED_AT = "stored_at"

_PLAIN = (int, float, str, bool, type(None))

FINISHED = "finished"
TRUNCATED = "truncated"
FAILED = "failed"


def integer_tag(value: Any, *, key: str, tag: str) -> int:
    """Return `value` as an int; TagError, with key and tag, if it is missing, a float or a bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TagError(f"{key}: tag {tag!r} is {value!r}; it must be an integer")


def check_tags(tags: Mapping[str, Any], *, key: str) -> None:
    """TagError if a tag is not int, float, str, bool, None or a list of them: a log could not write it."""
    for name, value in tags.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            # By exact type: NumPy's float64 is a float too, but the log cannot write it.
            if type(item) not in _PLAIN:
                raise TagError(
                    f"{key}: tag {name!r} holds {type(item).__name__}; "
                    "a tag is int, float, str, bool, null or a list of them"
                )


@dataclass(frozen=True, slots=True)
class GroupMeta:
    """One group's keys and tags. Reading a missing tag is a TagError with key and tag."""

    keys: tuple[str, ...]
    tags: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.keys:
            raise TagError("a group has no keys")
        for name, value in self.tags.items():
            if isinstance(value, list | tuple) and len(value) != len(self.keys):
                raise TagError(f"{self.keys[0]}: tag {name!r} has {len(value)} values for {len(self.keys)} samples")

    @property
    def size(self) -> int:
        return len(self.keys)

    @property
    def row(self) -> str:
        """The name of the group's row, common to all its keys."""
        return self.keys[0].rpartition("_")[0]

    def group_tag(self, name: str) -> Any:
        """Return a tag of the whole group."""
        if name not in self.tags:
            raise TagError(f"{self.keys[0]}: tag {name!r} is missing; it has {sorted(self.tags)}")
        return self.tags[name]

    def sample_tag(self, name: str) -> tuple[Any, ...]:
        """Return a tag per sample, in the order of `keys`."""
        value = self.group_tag(name)
        if not isinstance(value, list | tuple):
            raise TagError(f"{self.keys[0]}: tag {name!r} is {value!r}, not a list with one value per sample")
        return tuple(value)

    @property
    def group(self) -> int:
        """The group's dispatch number."""
        return integer_tag(self.group_tag(GROUP), key=self.keys[0], tag=GROUP)

    @property
    def prompt(self) -> int | str:
        value = self.group_tag(PROMPT)
        return value if isinstance(value, str) else integer_tag(value, key=self.keys[0], tag=PROMPT)

    @property
    def dataset(self) -> str:
        return str(self.group_tag(DATASET))

    @property
    def version(self) -> int:
        """The oldest weight version that produced a token: the one served at dispatch."""
        return integer_tag(self.group_tag(VERSION), key=self.keys[0], tag=VERSION)

    @property
    def prompt_tokens(self) -> int:
        return integer_tag(self.group_tag(PROMPT_TOKENS), key=self.keys[0], tag=PROMPT_TOKENS)

    @property
    def response_tokens(self) -> tuple[int, ...]:
        return self.sample_tag(RESPONSE_TOKENS)

    @property
    def trainable_tokens(self) -> tuple[int, ...]:
        return self.sample_tag(TRAINABLE_TOKENS)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return self.sample_tag(REWARD)

    @property
    def statuses(self) -> tuple[str, ...]:
        return self.sample_tag(STATUS)

    def age(self, trainer_version: int) -> int:
        """Return V minus the oldest version, in versions; TagError if the stamp is newer than V."""
        age = trainer_version - self.version
        if age < 0:
            raise TagError(
                f"{self.keys[0]}: version {self.version} is newer than the trainer's {trainer_version}; "
                "only served versions may be stamped"
            )
        return age

    def stamp(self, **tags: Any) -> "GroupMeta":
        """Return a copy with more tags; a list must have one value per sample."""
        return replace(self, tags={**self.tags, **tags})


def is_live_reward(reward: float | None) -> bool:
    """Return whether a reward counts in a group's statistics: it is present and finite."""
    return reward is not None and math.isfinite(reward)
