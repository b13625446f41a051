"""Scripts: what a collector does, one entry after the other, on the virtual clock. Groups are numbered from 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engine.records.group import check_tags
from asyncrl.filters.testing import make_group


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a collector does, after `seconds` on the virtual clock."""

    seconds: float = field(default=1.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class PutGroup(Entry):
    """Put a group of which these are the rewards; without a version it has the one served."""

    rewards: Sequence[float | None]
    version: int | None = None
    prompt: int | None = None
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetVersion(Entry):
    """Bring trainer and collector to a version, as if other batches had been trained."""

    version: int


@dataclass(frozen=True, slots=True)
class HangGroup(Entry):
    """Take up a group and never end it."""


@dataclass(frozen=True, slots=True)
class FailGroup(Entry):
    """Take up a group and fail with it."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class EndOfData(Entry):
    """Say that no more groups will come."""


def put(
    rewards: Sequence[float | None],
    *,
    version: int | None = None,
    prompt: int | None = None,
    seconds: float = 1.0,
    **tags: Any,
) -> PutGroup:
    """Put a group; keywords are those of `make_group` (lengths, failed, truncated) and further tags.

    Without `lengths` each response has 8 tokens. ValueError or TagError if they do not make a group.
    """
    size = len(rewards)
    for name in ("failed", "truncated"):
        outside = [index for index in tags.get(name, ()) if not 0 <= index < size]
        if outside:
            raise ValueError(f"{name} names sample {outside[0]} of a group of {size} samples")
    if version is not None and version < 0:
        raise ValueError(f"version is {version}; versions begin at 0")
    check_tags(make_group(rewards, version=version or 0, **tags).tags, key="put(...)")
    return PutGroup(rewards, version, prompt, tags, seconds=seconds)


def version(number: int, *, seconds: float = 1.0) -> SetVersion:
    """Bring trainer and collector to a version; ones that they have passed change nothing."""
    if number < 0:
        raise ValueError(f"version is {number}; versions begin at 0")
    return SetVersion(number, seconds=seconds)


def hang(*, seconds: float = 1.0) -> HangGroup:
    """Take up a group that never ends."""
    return HangGroup(seconds=seconds)


def fail(
    error: str = "RuntimeError: no answer", *, reason: str = "generation_error", seconds: float = 1.0
) -> FailGroup:
    """Fail with a group, as when its generator or its reward raises."""
    return FailGroup(reason, error, seconds=seconds)


def finish(*, seconds: float = 0.0) -> EndOfData:
    """End the data. A script without it ends its data after its last entry."""
    return EndOfData(seconds=seconds)


def check_script(script: Sequence[Entry]) -> None:
    """TypeError or ValueError if this is not a script, or its groups differ in size."""
    if isinstance(script, Entry):
        raise TypeError("a script is a list of entries: [put([0, 1]), ...]")
    for place, entry in enumerate(script):
        if not isinstance(entry, Entry):
            raise TypeError(
                f"entry {place} of the script is {entry!r}; entries are made by put, version, fail, hang and finish"
            )
    sizes = {len(entry.rewards) for entry in script if isinstance(entry, PutGroup)}
    if len(sizes) > 1:
        raise ValueError(f"groups of {sorted(sizes)} samples in one script; all groups of a run have one size")
