"""What becomes of the samples of groups that end: one fate for each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.fate import RUN_ENDED, TRAINED, dropped, failed, masked


@dataclass(frozen=True, slots=True)
class Settlement:
    """A group and the fate of each of its samples, in the order of its keys."""

    group: GroupMeta
    fates: tuple[str, ...]


def drop_fates(group: GroupMeta, reason: str) -> tuple[str, ...]:
    """Return the fates of a dropped group; samples that had failed stay failed."""
    causes = group.sample_tag(tag.CAUSE)
    return tuple(
        failed(str(cause)) if status == tag.FAILED else dropped(reason)
        for status, cause in zip(group.statuses, causes, strict=True)
    )


def trained_fates(group: GroupMeta, trained: Iterable[int], masks: Mapping[int, str]) -> tuple[str, ...]:
    """Return the fates of a group that was trained on; AsyncRLError if a sample is not trained, masked or failed."""
    chosen = set(trained)
    failing = {i for i, status in enumerate(group.statuses) if status == tag.FAILED}
    forgotten = [key for i, key in enumerate(group.keys) if i not in chosen | masks.keys() | failing]
    if forgotten:
        raise AsyncRLError(f"{', '.join(forgotten)} in a batch that was trained: neither trained, masked nor failed")
    base = drop_fates(group, RUN_ENDED)
    return tuple(TRAINED if i in chosen else masked(masks[i]) if i in masks else fate for i, fate in enumerate(base))
