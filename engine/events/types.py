"""The event types of the log: one JSON object per line, tagged by `type`.

`seq` is monotonic, `t` seconds since the run began (the run's own clock), `wall` Unix time.
Keys, groups and versions are those of the data plane. A field added by a later schema has a
default, so that every older log can be read; docs/event-log.md says what came when.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.engine.errors import TraceError
from asyncrl.engine.records.scores import Scores

SCHEMA = 3

AGE_REASONS = ("staleness/stale", "staleness/stale_tokens")
"""The filters' reasons about age in a log that does not name them."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises if it is not an event; RecursionError is for JSON that is nested too deep."""


# Events have no cycles. Without `gc=False` the garbage collector would walk all events that a reader keeps.
class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", gc=False):
    """The base of all events; the log fills in `seq`, `t` and `wall`."""

    seq: int = 0
    t: float = 0.0
    wall: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """`config` holds every value in force; `process_wall` is when the process was created,
    or, of a run from Python, when `run` was called.

    `cost` holds the fields of the cost model by which plans are balanced; null: by tokens. `part`: the log
    is a slice of a run's, and lacks events on purpose. `age_reasons` are those that the chain's filters declare
    to be about age; logs that say nothing of them are of built-in filters.
    """

    schema: int
    config: dict[str, Any]
    software: dict[str, str]
    process_wall: float | None = None
    cost: dict[str, Any] | None = None
    part: bool = False
    age_reasons: tuple[str, ...] = AGE_REASONS


class Dispatched(Event, frozen=True, kw_only=True, tag="dispatched"):
    """A group was dispatched. `retry_of` is the earlier group of the same prompt that this one repeats."""

    group: int
    prompt: int | str
    dataset: str
    size: int
    collector: str
    seed: int = 0
    retry_of: int | None = None


class Span(Event, frozen=True, kw_only=True, tag="span"):
    """Response tokens of a group that one version produced; one event per version, oldest first."""

    group: int
    version: int
    tokens: int


class Finished(Event, frozen=True, kw_only=True, tag="finished"):
    """A group is generated and scored. `seconds` since its collector took it up; null if not known."""

    group: int
    tokens: int
    seconds: float | None = None


class Put(Event, frozen=True, kw_only=True, tag="put"):
    """A whole group is in the data plane, with the tags as the front end will see them, and their digest."""

    group: int
    keys: list[str]
    tags: dict[str, Any]
    digest: int | None = None


class GroupFailed(Event, frozen=True, kw_only=True, tag="group_failed"):
    group: int
    reason: str
    error: str


class Claimed(Event, frozen=True, kw_only=True, tag="claimed"):
    """Groups were claimed; the claim asked for at most `asked` groups (null: not known)."""

    claim: str
    fence: int
    groups: list[int]
    asked: int | None = None


class ClaimReturned(Event, frozen=True, kw_only=True, tag="claim_returned"):
    """Claimed groups are ready again, by their owner's wish. For claimers beside the driver; a run has none yet."""

    groups: list[int]


class OwnerDead(Event, frozen=True, kw_only=True, tag="owner_dead"):
    """An actor, or a driver with claims, died or was declared dead; `error` is the cause. Its groups are ready
    again. `replaced`: the run goes on without it, and another is started in its place."""

    owner: str
    groups: list[int]
    error: str = ""
    replaced: bool = False


class CollectorAdded(Event, frozen=True, kw_only=True, tag="collector_added"):
    """A collector was started while the run goes on, and is to join."""

    collector: str


class CollectorJoined(Event, frozen=True, kw_only=True, tag="collector_joined"):
    """A collector that was added takes part: it serves the newest weights that were published."""

    collector: str


class CollectorLeaving(Event, frozen=True, kw_only=True, tag="collector_leaving"):
    """A collector is to leave: it is granted nothing more. What it has in flight after `seconds` (null: no limit) it
    hands back."""

    collector: str
    seconds: float | None = None


class CollectorLeft(Event, frozen=True, kw_only=True, tag="collector_left"):
    """A collector is gone, with nothing in flight, and none comes in its place."""

    collector: str


class RanksPlaced(Event, frozen=True, kw_only=True, tag="ranks_placed"):
    """The node of each rank, by address. From here on plans prefer for a rank what is stored on its node."""

    nodes: list[str]


class ActorRestarted(Event, frozen=True, kw_only=True, tag="actor_restarted"):
    """An actor that died was replaced, and its successor works: it serves the newest weights that were published.

    `restart` counts its restarts within the window of the policy, `seconds` have passed since its death.
    """

    actor: str
    restart: int = 1
    seconds: float = 0.0


class Judged(Event, frozen=True, kw_only=True, tag="judged"):
    """The verdict on one group of a batch: kept (`dropped` is null), or dropped for a reason by a filter.

    `digest` is that of the tags that were judged; it ties the verdict to the put.
    """

    group: int
    batch: int
    age: int
    dropped: str | None
    by: str
    masked: dict[int, str]
    digest: int | None = None


class BatchJudged(Event, frozen=True, kw_only=True, tag="batch_judged"):
    """A batch is complete. The rewards are those of all its samples with a finite reward, before any filter."""

    batch: int
    judged: int
    kept: int
    attempts: int
    reward_sum: float
    reward_count: int


class BatchTaken(Event, frozen=True, kw_only=True, tag="batch_taken"):
    """The trainer took a batch: groups judged from here on will be trained at the next version."""

    batch: int


class BatchGivenUp(Event, frozen=True, kw_only=True, tag="batch_given_up"):
    """A batch that was taken makes no step, because none of its samples can be trained."""

    batch: int


class Measured(Event, frozen=True, kw_only=True, tag="measured"):
    """The ranks measured log π - log π_sampler on a batch: by key the largest absolute value, and the mean."""

    batch: int
    log_ratios: dict[str, list[Any]]


class VersionSet(Event, frozen=True, kw_only=True, tag="version_set"):
    """The trainer is at a version that no step of this log made: it was restored, or set by a script."""

    version: int


class Planned(Event, frozen=True, kw_only=True, tag="planned"):
    """Per rank, per micro-batch: keys. Fillers repeat a key with weight zero.

    `updates` says how many of every rank's micro-batches make up each optimizer update; empty: all are one.
    `filler_places` has the rank and the position of each filler, from 0; older logs have only their number.
    """

    batch: int
    step: int
    ranks: list[list[list[str]]]
    fillers: int
    updates: tuple[int, ...] = ()
    filler_places: tuple[tuple[int, int], ...] = ()


class StepStarted(Event, frozen=True, kw_only=True, tag="step_started"):
    step: int
    version: int
    groups: list[int]


class WorkGiven(Event, frozen=True, kw_only=True, tag="work_given"):
    """What the ranks are given for a stage (`logprobs`, `reference_logprobs`, `train`), as digests, by rank.

    `parts` has the CRC-32 of each part by name (Work.digests); `samples` that of each sample, keys sorted.
    """

    step: int
    stage: str
    parts: list[dict[str, int]]
    samples: list[list[int]]


class StepEnded(Event, frozen=True, kw_only=True, tag="step_ended"):
    """V is now `version`. `ages` counts trained samples by age, as strings of versions.

    `rank_seconds` is what each rank's micro-batches took, `predicted_seconds` what was expected (empty: nothing).
    """

    step: int
    version: int
    seconds: float
    ages: dict[str, int]
    samples: int
    tokens: int
    reward_sum: float
    metrics: dict[str, float]
    rank_seconds: tuple[float, ...] = ()
    predicted_seconds: tuple[float, ...] = ()


class PublishStarted(Event, frozen=True, kw_only=True, tag="publish_started"):
    version: int


class PublishFailed(Event, frozen=True, kw_only=True, tag="publish_failed"):
    version: int
    error: str


class Acknowledged(Event, frozen=True, kw_only=True, tag="acknowledged"):
    generator: str
    version: int


class Published(Event, frozen=True, kw_only=True, tag="published"):
    """Every generator serves a version. `gather_s` is what the trainer took to send it. The other seconds are of the
    slowest generator: what it took to get the weights, and beside generation to stage them, and the pause without a
    token made. `bytes` are the weights', `sent_bytes` those that went to each generator. 0 where nobody says."""

    version: int
    seconds: float
    stage_s: float = 0.0
    pause_s: float = 0.0
    bytes: int = 0
    gather_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0


class Settled(Event, frozen=True, kw_only=True, tag="settled"):
    """The fate of each sample of a group, in the order of the indexes."""

    group: int
    fates: list[str]


class Released(Event, frozen=True, kw_only=True, tag="released"):
    """Capacity of groups came back to run-ahead."""

    groups: list[int]


class EvaluationStarted(Event, frozen=True, kw_only=True, tag="evaluation_started"):
    """The evaluator has the weights of a version, and is asked `prompts` prompts, `samples` times each."""

    version: int
    prompts: int
    samples: int


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """A prompt was answered in an evaluation: by sample the reward (null: it failed), tokens and how it ended."""

    version: int
    prompt: int | str
    dataset: str
    rewards: list[Any]
    tokens: list[int]
    statuses: list[str]


class EvaluationEnded(Event, frozen=True, kw_only=True, tag="evaluation_ended"):
    """What an evaluation came to, over all prompts and by data set: it follows from its `evaluated` events."""

    version: int
    seconds: float
    scores: Scores
    datasets: dict[str, Scores]


class EvaluationFailed(Event, frozen=True, kw_only=True, tag="evaluation_failed"):
    """A version has no evaluation: it went wrong, or, if `skipped`, the one before was still under way."""

    version: int
    error: str
    skipped: bool = False


EVALUATIONS = (EvaluationStarted, Evaluated, EvaluationEnded, EvaluationFailed)
"""The types of the events of evaluations, which say nothing of training."""


class Checkpointed(Event, frozen=True, kw_only=True, tag="checkpointed"):
    """The state of the run after everything up to this event goes to `path`, in the run's folder, while the run goes
    on. It is there once it is whole: the event alone does not say that it ever was."""

    path: str
    version: int


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """The run continues from a checkpoint: events after number `after`, up to this one, are void.

    `after` is the number of the last event that the checkpoint holds; 1, and no name of a checkpoint, if there was none
    and the run began anew. `config` holds every value in force from here on; empty: those of before. `attempt` counts
    the attempts of the command, from 1; one after the first has the `cause` of the failure before it.
    """

    checkpoint: str
    after: int
    config: dict[str, Any] = {}
    attempt: int = 1
    cause: str = ""


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    """`keys_left` counts keys of the run in the data plane; null if it no longer answered.

    `filters` says what each filter did, by name. `model` says which versions were saved, by folder, and how many saves
    failed; null if the run saves none. `skipped` says how many records of data sets were left out, by reason.
    """

    code: int
    reason: str
    keys_left: int | None = None
    filters: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    skipped: dict[str, int] | None = None


AnyEvent = (
    RunStarted
    | Dispatched
    | Span
    | Finished
    | Put
    | GroupFailed
    | Claimed
    | ClaimReturned
    | OwnerDead
    | ActorRestarted
    | CollectorAdded
    | CollectorJoined
    | CollectorLeaving
    | CollectorLeft
    | RanksPlaced
    | Judged
    | BatchJudged
    | BatchTaken
    | BatchGivenUp
    | VersionSet
    | Measured
    | Planned
    | StepStarted
    | WorkGiven
    | StepEnded
    | PublishStarted
    | PublishFailed
    | Acknowledged
    | Published
    | Settled
    | Released
    | EvaluationStarted
    | Evaluated
    | EvaluationEnded
    | EvaluationFailed
    | Checkpointed
    | Resumed
    | RunEnded
)


def check_schema(schema: int) -> None:
    """TraceError, with both numbers, if a schema is newer than this asyncrl's."""
    if schema > SCHEMA:
        raise TraceError(
            f"the log has schema {schema}, and this asyncrl reads up to {SCHEMA}; "
            "read it with the asyncrl that wrote it"
        )


def written(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return tags in their written form: JSON has no NaN or infinity, so those become {"float": name}."""
    return {name: _written(value) for name, value in tags.items()}


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, list | tuple):
        if float not in set(map(type, value)):
            return value
        return [_written(item) for item in value]
    return value


def digest(tags: Mapping[str, Any]) -> int:
    """Return the CRC-32 of tags in their written form, whatever their order."""
    return digest_written(written(tags))


def digest_written(tags: Mapping[str, Any]) -> int:
    """Return the digest of tags that are already in their written form."""
    try:
        return zlib.crc32(_encode(dict(sorted(tags.items()))))
    except UnicodeEncodeError:  # In the order of the names as they are written.
        return zlib.crc32(_encode(dict(sorted(_escaped(tags).items()))))


_encode = msgspec.json.Encoder().encode


def encoded(value: Any) -> bytes:
    """Return an event, or part of one, as JSON; what UTF-8 cannot write (half a surrogate pair) is escaped."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_escaped(msgspec.to_builtins(value)))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case Mapping():
            return {_escaped(name): _escaped(item) for name, item in value.items()}
        case list() | tuple():
            return [_escaped(item) for item in value]
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
