"""What an actor tells the controller, in the order in which it happened there."""

from dataclasses import dataclass

from asyncrl.engine.records.group import GroupMeta


@dataclass(frozen=True, slots=True)
class PutNotice:
    """A whole group is in the data plane; `seconds` is how long it took to generate, score and put.

    `errors` say what went wrong with its failed samples.
    """

    group: GroupMeta
    seconds: float | None = None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A granted group ended without a put; `error` is the traceback where it happened."""

    group: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Served:
    """The sender's generator has loaded `version` whole."""

    version: int


Message = PutNotice | GroupFailure | Served
