"""What a filter says of a group: keep, drop, mask some samples, or rescue it from later drops."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KEEP = "keep"
    DROP = "drop"
    MASK = "mask"
    RESCUE = "rescue"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Built by `keep`, `drop`, `mask` and `rescue`; `samples` are indexes within the group."""

    kind: Kind
    reason: str = ""
    samples: tuple[int, ...] = ()
    keep_reward: bool = True
    rescued: frozenset[str] = frozenset()


_KEEP = Verdict(Kind.KEEP)


def keep() -> Verdict:
    """Let the group pass."""
    return _KEEP


def drop(reason: str) -> Verdict:
    """Drop the whole group, unless an earlier filter rescued it from this reason; later filters do not see it."""
    return Verdict(Kind.DROP, reason=reason)


def mask(samples: Iterable[int], reason: str, *, keep_reward: bool) -> Verdict:
    """Train on the group without these samples.

    With `keep_reward` their rewards still count in the group's statistics, also if a response has no token to
    train. Without it they do not count. Example: rewards 0, 0, 1, of which the 1 is masked. With its reward kept the
    mean is 1/3 and the other two have negative advantages; without it the mean is 0 and the group is flat.
    """
    return Verdict(Kind.MASK, reason=reason, samples=tuple(samples), keep_reward=keep_reward)


def rescue(reasons: Iterable[str]) -> Verdict:
    """Protect the group from later drops for these reasons; TypeError if `reasons` is a string."""
    if isinstance(reasons, str):
        raise TypeError(f"rescue takes a list of reasons; write rescue([{reasons!r}])")
    return Verdict(Kind.RESCUE, rescued=frozenset(reasons))
