"""What the controller's loop may do, by the log: publishes, claims through the gate, cancelling, and the end.

It trusts the order of events, the configuration, and the rules of gate and balance (engine/loop/); none of the run's
folds. It says nothing of timing: of what may happen it does not ask how soon.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from asyncrl.configs import RunConfig
from asyncrl.engine.events.types import (
    EVALUATIONS,
    Acknowledged,
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    BatchTaken,
    Claimed,
    ClaimReturned,
    CollectorLeaving,
    CollectorLeft,
    Dispatched,
    Judged,
    OwnerDead,
    Published,
    PublishFailed,
    PublishStarted,
    Put,
    Released,
    Resumed,
    RunEnded,
    Settled,
    StepEnded,
    StepStarted,
    VersionSet,
)
from asyncrl.engine.loop.balance import Balance
from asyncrl.engine.loop.claim_gate import can_claim_without_expiring
from asyncrl.engine.records.ending import DATA_EXHAUSTED, LIMIT_BATCHES, LIMIT_STEPS
from asyncrl.engine.records.fate import CANCELLED, RECALLED, RUN_ENDED, dropped
from asyncrl.engine.trace.grants import Grants
from asyncrl.engine.trace.recording import Recording

# Events have their time to the microsecond.
_ROUNDING_S = 1e-5


class Loop:
    """A fold over the log of one controller; `fault` says in words what an event may not do, or nothing.

    A script has no controller: what publishes nothing is not asked. Nor is what comes after a resume, or after
    a version that no step made.
    """

    def __init__(self, recording: Recording, config: RunConfig, *, refill: bool) -> None:
        ended = recording.ended
        in_order = ended is not None and (ended.code == 1 or ended.reason in (LIMIT_STEPS, DATA_EXHAUSTED))
        self._checked = any(isinstance(event, PublishStarted) for event in recording.events)
        self._parts = (
            Grants(config, refill=refill, lost_first=in_order, final=_last_release(recording)),
            _Publishes(recording.generators),
            _Claims(config, refill=refill),
            _Recalls(recording.generators, config),
            _Ends(config),
        )

    def fault(self, event: AnyEvent) -> str:
        if isinstance(event, Resumed | VersionSet):
            self._checked = False
        if not self._checked:
            return ""
        return next((said for part in self._parts for said in part.apply(event)), "")


def _last_release(recording: Recording) -> AnyEvent | None:
    """Return the event by which the end of a run gives back all capacity, if there is one; RunEnded may lack.

    Training may be followed by the evaluation of its last version.
    """
    of_training = (event for event in reversed(recording.events) if not isinstance(event, EVALUATIONS))
    before = [event for event in reversed([*islice(of_training, 3)]) if isinstance(event, Released)]
    return before[-1] if before else None


class _Publishes:
    """One version after the other; published is what every generator has acknowledged."""

    def __init__(self, generators: Sequence[str]) -> None:
        self._served = dict.fromkeys(generators, 0)
        self._trainer = 0
        self._started = -1
        self._open = False

    def apply(self, event: AnyEvent) -> Iterator[str]:
        match event:
            case StepEnded():
                self._trainer = event.version
            case PublishStarted():
                if self._open or event.version != self._started + 1 or event.version > self._trainer:
                    state = f"version {self._started} {'is under way' if self._open else 'was last'}"
                    yield f"version {event.version}, while {state} and the trainer is at {self._trainer}"
                self._started, self._open = event.version, True
            case PublishFailed() | Published() if not self._open or event.version != self._started:
                yield f"version {event.version} is not under way"
            case Published():
                self._open = False
                behind = sorted(name for name, version in self._served.items() if version < event.version)
                if behind:
                    yield f"version {event.version}, which {behind[0]} does not serve"
            case Acknowledged():
                served = self._served.get(event.generator, 0)  # One in a dead one's place joins by this.
                if not served <= event.version <= self._started:
                    yield f"version {event.version}, after {served}; the newest that was sent is {self._started}"
                self._served[event.generator] = event.version
            case OwnerDead() if event.replaced:
                self._served.pop(event.owner, None)
            case CollectorLeft():
                self._served.pop(event.collector, None)


class _Claims:
    """In mode `gate` a claim waits until the gate lets it pass; cancelled is only what no batch could train."""

    def __init__(self, config: RunConfig, *, refill: bool) -> None:
        self._rollout = config.rollout
        self._refill = refill
        self._served: dict[str, int] = {}
        self._in_flight: dict[int, int] = {}
        self._buffered: dict[int, int] = {}
        self._trainer = 0
        self._under_way = False
        self._newest = 0
        self._fence = 0
        self._owner = ""
        # Of the time since the front end last did something: when that was, and how things stood.
        self._since = 0.0
        self._overdue = False
        self._stood: list[tuple[list[int], list[int], int]] = []

    def apply(self, event: AnyEvent) -> Iterator[str]:
        if isinstance(event, Claimed):
            yield from self._claim(event)
        if isinstance(event, Settled) and dropped(CANCELLED) in event.fates:
            yield from self._cancel(event)
        self._follow(event)
        returned = isinstance(event, ClaimReturned | OwnerDead) and bool(event.groups)
        if returned or isinstance(event, Claimed | Judged | BatchJudged):
            self._since = event.t
            self._stood.clear()
        if self._rollout.stale_mode == "gate":
            at = self._trainer + self._under_way
            self._stood.append((list(self._buffered.values()), list(self._in_flight.values()), at))

    def _follow(self, event: AnyEvent) -> None:
        match event:
            case Acknowledged():
                self._served[event.generator] = event.version
            case Dispatched():
                self._in_flight[event.group] = self._served.get(event.collector, 0)
            case Put():
                self._in_flight.pop(event.group, None)
                self._buffered[event.group] = event.tags["version"]
            case Claimed():
                for group in event.groups:
                    self._buffered.pop(group, None)
            case ClaimReturned() | OwnerDead() if event.groups:
                # The version of a group that comes again is not needed: the gate is not asked any more.
                self._rollout = self._rollout.model_copy(update={"stale_mode": "drop"})
            case Settled():
                self._in_flight.pop(event.group, None)
            case BatchJudged():
                self._overdue = False
            case BatchTaken():
                self._under_way = True
            case BatchGivenUp():
                self._under_way = False
            case StepEnded():
                self._trainer, self._under_way = event.version, False
        self._newest = max(self._newest, self._trainer + self._under_way)

    def _claim(self, event: Claimed) -> Iterator[str]:
        if event.fence <= self._fence:
            yield f"its fencing number {event.fence} comes after {self._fence}; they go up"
        self._fence = event.fence
        order = [(self._buffered[group], group) for group in event.groups if group in self._buffered]
        if order != sorted(order):
            yield f"groups {event.groups} are not taken oldest version first, then in order of dispatch"
        owner = event.claim.rpartition("/")[0]
        self._owner = self._owner or owner
        if self._rollout.stale_mode != "gate" or owner != self._owner or event.asked is None:
            return
        self._overdue = self._overdue or event.t - self._since >= self._rollout.gate_timeout_s
        if not self._overdue and not any(self._passes(event.asked, *stood) for stood in self._stood):
            yield f"the gate holds a claim of {event.asked} groups back: a later group would get too old"

    def _passes(self, wanted: int, arrived: list[int], in_flight: list[int], at: int) -> bool:
        # A hand-off that refills asks for a batch that is under way already.
        versions = {at, self._trainer} if self._refill else {at}
        return any(
            can_claim_without_expiring(
                arrived=arrived,
                in_flight=in_flight,
                wanted=wanted,
                per_batch=self._rollout.groups_per_step,
                at=version,
                bound=self._rollout.max_staleness,
            )
            for version in versions
        )

    def _cancel(self, event: Settled) -> Iterator[str]:
        stamp = self._in_flight.get(event.group, self._newest)
        if not self._rollout.cancel_stale or self._newest - stamp <= self._rollout.max_staleness:
            yield f"it was cancelled at version {self._newest}, dispatched at {stamp}; a batch could have trained it"


class _Recalls:
    """Recalled is only what a collector has that was late, by the balance's own rule, or that leaves."""

    def __init__(self, generators: Sequence[str], config: RunConfig) -> None:
        self._balance = Balance(generators, exact=config.rollout.max_staleness == 0)
        self._drops = config.rollout.stale_mode == "drop"
        self._late: set[int] = set()
        self._in_flight: dict[int, str] = {}

    def apply(self, event: AnyEvent) -> Iterator[str]:
        match event:
            case Dispatched():
                self._in_flight[event.group] = event.collector
            case CollectorLeaving():
                # Whatever it does not finish, it hands back.
                self._late.update(group for group, name in self._in_flight.items() if name == event.collector)
            case Put():
                self._in_flight.pop(event.group, None)
        for at, groups in self._balance.late().values():
            if self._drops and at <= event.t + _ROUNDING_S:
                self._late.update(groups)
        if isinstance(event, Settled) and dropped(RECALLED) in event.fates and event.group not in self._late:
            yield "it was recalled, and its collector was neither late nor to leave"
        if isinstance(event, Balance.kinds):
            self._balance.apply(event)


class _Ends:
    """A run goes on to its limit and no further; at the end of the data nothing is left to judge."""

    def __init__(self, config: RunConfig) -> None:
        self._run = config.run
        self._steps = 0
        self._batches = 0
        self._open: set[int] = set()
        self._unjudged: list[int] = []

    def apply(self, event: AnyEvent) -> Iterator[str]:
        run = self._run
        match event:
            case Dispatched():
                self._open.add(event.group)
            case Judged():
                self._open.discard(event.group)
            case Settled():
                if event.group in self._open and dropped(RUN_ENDED) in event.fates:
                    self._unjudged.append(event.group)
                self._open.discard(event.group)
            case BatchJudged():
                self._batches += 1
            case StepStarted() if run.steps is not None and event.step > run.steps:
                yield f"step {event.step}; the run ends after {run.steps}"
            case StepEnded():
                self._steps = event.version
            case RunEnded() if event.reason.startswith(LIMIT_STEPS) and self._steps != run.steps:
                yield f"{event.reason!r} after {self._steps} steps; the limit is {run.steps}"
            case RunEnded() if event.reason.startswith(LIMIT_BATCHES) and self._batches != run.batches:
                yield f"{event.reason!r} after {self._batches} batches; the limit is {run.batches}"
            case RunEnded() if event.reason.startswith(DATA_EXHAUSTED) and self._unjudged:
                yield f"{event.reason!r}, and groups {self._unjudged[:5]} were never judged"
