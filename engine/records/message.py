"""Messages of an actor to the controller, in the order in which things happened at the actor."""

from dataclasses import dataclass, field

from asyncrl.engine.records.engine_use import EngineUse
from asyncrl.engine.records.group import GroupMeta
from asyncrl.engine.records.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PutNotice:
    """A whole group is in the data plane; `seconds` is the time to generate, score and put it.

    `errors` describe what went wrong with its failed samples. `use` is the engine's since the collector's first grant;
    None where the generator does not tell. `traffic` is what the collector put since its last notice.
    """

    group: GroupMeta
    seconds: float | None = None
    errors: tuple[str, ...] = ()
    use: EngineUse | None = None
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A dispatched group ended without a put; `error` is the traceback."""

    group: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Served:
    """The sender's generator has loaded `version` completely."""

    version: int


Message = PutNotice | GroupFailure | Served
