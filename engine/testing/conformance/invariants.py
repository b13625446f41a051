"""The invariants of DESIGN.md, section 3, held against one simulated run: whatever breaks one, in words.

Worked out from the plain events and from what was really done to plane, generators and ranks;
none of the product's folds or bounds is asked.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.engine.events.types import (
    Acknowledged,
    ActorRestarted,
    BatchJudged,
    Claimed,
    CollectorJoined,
    CollectorLeft,
    Dispatched,
    Judged,
    OwnerDead,
    Planned,
    Published,
    Put,
    Released,
    Settled,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.ending import DATA_EXHAUSTED
from asyncrl.engine.records.keys import row_of
from asyncrl.engine.testing.audit import Audit
from asyncrl.engine.testing.conformance.watch import WatchedPlane
from asyncrl.engine.testing.simulation import Outcome

# Events have their time to the microsecond.
_ROUNDING_S = 1e-5
_OF_THE_FRONT_END = ("stale", "lease_lost", "run_ended")


def violations(outcome: Outcome, plane: WatchedPlane, *, patience_s: float) -> list[str]:
    """Say what a run broke. `patience_s` is how long anything may take that waits for nothing but the plane."""
    case = _Case(outcome, plane, patience_s, outcome.audit)
    if case.audit.broken:
        return case.audit.faults
    rules = (_conserves, _settles, _ages, _stays_whole, _claims, _plans, _versions, _budget, _batches, _wakes, _finite)
    return [*case.audit.faults, *(said for rule in rules for said in rule(case))]


@dataclass(slots=True)
class _Case:
    outcome: Outcome
    plane: WatchedPlane
    patience_s: float
    audit: Audit
    put: dict[int, Put] = field(default_factory=dict)
    judged: dict[int, Judged] = field(default_factory=dict)
    step_of_batch: dict[int, int] = field(default_factory=dict)
    settled_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.put = {event.group: event for event in self.outcome.of(Put)}
        self.judged = {event.group: event for event in self.outcome.of(Judged)}
        self.step_of_batch = {event.batch: event.step for event in self.outcome.of(Planned)}
        self.settled_at = {event.group: event.t for event in self.outcome.of(Settled)}

    @property
    def refills(self) -> bool:
        return any(entry["name"] == "dynamic_sampling" for entry in self.outcome.config.filters)

    @property
    def end_s(self) -> float:
        return self.outcome.events[-1].t


def _conserves(case: _Case) -> Iterator[str]:
    """Invariant 1: at the end nothing is left, and no key of a settled group outlived it in the plane."""
    if case.outcome.keys_left:
        yield f"keys are left: {case.outcome.keys_left}"
    left = [group for group, fates in case.audit.fates.items() if "dropped:run_ended" in fates]
    if case.outcome.ending.reason.startswith(DATA_EXHAUSTED) and left:
        yield f"the data ended, and groups {left} were not judged"
    if case.outcome.ledger.unsettled:
        yield f"the ledger still has {case.outcome.ledger.unsettled}"
    for row in sorted({row_of(key) for key in case.plane.at_end}):
        group = int(row.partition("_p")[2])
        settled = case.settled_at.get(group, math.inf)
        fates = case.audit.fates.get(group, [])
        # What a killed collector had sent may come to the plane when nobody knows the group any more.
        lost = "dropped:lease_lost" in fates or "failed:collector_died" in fates
        if settled < case.end_s - case.patience_s and not lost:
            yield f"group {group} settled at {settled:g} s and was never cleared"


def _settles(case: _Case) -> Iterator[str]:
    """Invariant 2: the fates are those that the verdicts say."""
    for group, fates in case.audit.fates.items():
        judged = case.judged.get(group)
        if judged is None:
            continue
        kinds = {fate for fate in fates if not fate.startswith("failed:")}
        if judged.dropped is not None and kinds - {f"dropped:{judged.dropped}"}:
            yield f"group {group} was dropped for {judged.dropped} and settled {fates}"
        if judged.dropped is None:
            allowed = {f"dropped:{reason}" for reason in _OF_THE_FRONT_END}
            odd = {fate for fate in kinds if fate.startswith("dropped:")} - allowed
            if odd:
                yield f"group {group} was kept and settled {fates}"
        for index in judged.masked:
            if judged.dropped is None and not fates[index].startswith(("masked:", "dropped:")):
                yield f"sample {index} of group {group} was masked and settled {fates[index]}"


def _ages(case: _Case) -> Iterator[str]:
    """Invariant 3: no token over the bound, none from the future; in mode `tokens`, none withheld that is within."""
    bound = case.outcome.config.rollout.max_staleness
    mode = case.outcome.config.rollout.stale_mode
    versions = {event.step: event.version for event in case.outcome.of(StepStarted)}
    counted: Counter[int] = Counter()
    for rank in case.outcome.ranks:
        for (step, key), withheld in rank.withheld.items():
            group = int(row_of(key).partition("_p")[2])
            ages = [versions[step] - version for version in _token_versions(case, group, key)]
            trained = ages[withheld:]
            counted[max(trained, default=-1)] += 1
            if any(age > bound or age < 0 for age in trained) or not trained:
                yield f"step {step} trained {key} on tokens of ages {trained}; the bound is {bound}"
            if any(age <= bound for age in ages[:withheld]) or (withheld and mode != "tokens"):
                yield f"step {step} withheld tokens of ages {ages[:withheld]} of {key}; the bound is {bound}"
    if mode != "tokens":
        through = [group for group, fates in case.audit.fates.items() if "masked:stale" in fates]
        if through:
            yield f"groups {through} were let through over the bound of {bound}"
    said: Counter[int] = Counter()
    for event in case.outcome.of(StepEnded):
        said.update({int(age): n for age, n in event.ages.items()})
    ended = case.outcome.of(StepEnded)
    if len(ended) == len(versions):
        # A stamp is of the dispatch, and may be older than the first token; it is never newer.
        pairs = list(zip(sorted(said.elements()), sorted(counted.elements()), strict=False))
        if said.total() != counted.total() or any(stamped < real for stamped, real in pairs):
            yield f"the steps say ages {dict(said)}; trained were {dict(counted)}"


def _token_versions(case: _Case, group: int, key: str) -> list[int]:
    """Return the version of each response token, from the tag as it was put."""
    put = case.put[group]
    index = put.keys.index(key)
    tags = case.audit.tags[group]
    tokens = tags["response_tokens"][index]
    if "spans" not in tags:
        return [tags["version"]] * tokens
    starts = [tuple(map(int, part.split(":"))) for part in tags["spans"][index].split(",")]
    return [max(version for version, first in starts if first <= i) for i in range(tokens)]


def _stays_whole(case: _Case) -> Iterator[str]:
    """Invariant 4: a group is trained as a whole, and only with enough live samples."""
    fewest = case.outcome.config.rollout.min_live
    for group, fates in case.audit.fates.items():
        put = case.put.get(group)
        if put is not None and len(put.keys) != len(fates):
            yield f"group {group} was put with {len(put.keys)} samples and settled {len(fates)}"
        if "trained" not in fates:
            continue
        tags = case.audit.tags[group]
        live = [
            i
            for i, (status, reward) in enumerate(zip(tags["status"], tags["reward"], strict=True))
            if status != "failed" and reward is not None and math.isfinite(reward) and tags["trainable_tokens"][i] > 0
        ]
        if len(live) < fewest:
            yield f"group {group} was trained with {len(live)} live samples"
        if any(not fates[i].startswith(("trained", "masked:")) for i in live):
            yield f"group {group} was split: {fates}"
        if any(fate.startswith("dropped:") for fate in fates):
            yield f"group {group} was trained in part and dropped in part: {fates}"
        if any(fate == "trained" for i, fate in enumerate(fates) if i not in live):
            yield f"group {group} was trained on a sample that is not live: {fates}"


def _claims(case: _Case) -> Iterator[str]:
    """Invariant 5: each group is claimed once, under a number of its own, oldest version first."""
    yield from (f"{row} was handed out {n} times" for row, n in case.plane.handed_out.items() if n > 1)
    fences: list[int] = []
    seen: set[int] = set()
    for event in case.outcome.of(Claimed):
        if fences and event.fence <= fences[-1]:
            yield f"claim {event.claim} has fence {event.fence} after {fences[-1]}"
        fences.append(event.fence)
        for group in event.groups:
            if group in seen:
                yield f"group {group} was claimed twice"
            seen.add(group)
        order = [(case.put[group].tags["version"], group) for group in event.groups if group in case.put]
        if order != sorted(order):
            yield f"claim {event.claim} is out of order: {order}"


def _plans(case: _Case) -> Iterator[str]:
    """Invariants 6 and 7: equal counts, budgets, the union; what ranks trained is what was planned, fillers apart."""
    budget = case.outcome.config.trainer.micro_batch_tokens
    ended = {event.step: event for event in case.outcome.of(StepEnded)}
    by_step: defaultdict[int, list[str]] = defaultdict(list)
    for rank in case.outcome.ranks:
        for step, keys in rank.trained:
            by_step[step] += keys
    for plan in case.outcome.of(Planned):
        if len({len(rank) for rank in plan.ranks}) != 1:
            yield f"step {plan.step} has {[len(rank) for rank in plan.ranks]} micro-batches"
        real = [
            key
            for number, rank in enumerate(plan.ranks)
            for place, micro in enumerate(rank)
            for key in micro
            if (number, place) not in plan.filler_places
        ]
        if len(set(real)) != len(real) or len(plan.filler_places) != plan.fillers:
            yield f"step {plan.step} has {plan.fillers} fillers, at {plan.filler_places}, and trains {sorted(real)}"
        sizes = [sum(_tokens(case, key) for key in micro) for rank in plan.ranks for micro in rank]
        if max(sizes) > budget:
            yield f"step {plan.step} has a micro-batch of {max(sizes)} tokens, over {budget}"
        planned = sorted(real)
        if plan.step not in ended:
            continue
        if sorted(by_step[plan.step]) != planned:
            yield f"step {plan.step} planned {planned} and trained {sorted(by_step[plan.step])}"
        if case.audit.trained_keys.get(plan.step, []) and sorted(case.audit.trained_keys[plan.step]) != planned:
            yield f"step {plan.step} planned {planned} and settled {case.audit.trained_keys[plan.step]}"
        withheld = sum(n for r in case.outcome.ranks for (step, _), n in r.withheld.items() if step == plan.step)
        tokens = sum(_responses(case, key) for key in planned) - withheld
        if ended[plan.step].tokens != tokens:
            yield f"step {plan.step} says {ended[plan.step].tokens} tokens; its keys have {tokens}"
        if ended[plan.step].samples != len(planned):
            yield f"step {plan.step} says {ended[plan.step].samples} samples; its keys are {len(planned)}"


def _responses(case: _Case, key: str) -> int:
    group = int(row_of(key).partition("_p")[2])
    tokens: int = case.audit.tags[group]["response_tokens"][case.put[group].keys.index(key)]
    return tokens


def _tokens(case: _Case, key: str) -> int:
    group = int(row_of(key).partition("_p")[2])
    prompt: int = case.audit.tags[group]["prompt_tokens"]
    return prompt + _responses(case, key)


def _versions(case: _Case) -> Iterator[str]:
    """Invariant 8: only what was loaded whole is served, published is what all serve, stamps are those of dispatch."""
    lives = {f"collector{i}": [generator.loaded_at] for i, generator in enumerate(case.outcome.generators)}
    served = dict.fromkeys(lives, 0)
    for name, successors in case.outcome.successors.items():
        lives.setdefault(name, []).extend(successor.loaded_at for successor in successors)
    yield from _stamps(case, lives)
    loaded = {name: of_lives.pop(0) for name, of_lives in lives.items()}
    bound = case.outcome.config.max_publish_lag
    for event in case.outcome.events:
        match event:
            case OwnerDead() if event.replaced:
                served.pop(event.owner, None)
                # Each start of another one is another life, if it came to that.
                loaded[event.owner] = lives[event.owner].pop(0) if lives[event.owner] else {}
            case CollectorLeft():
                served.pop(event.collector, None)
            case Acknowledged():
                if loaded[event.generator].get(event.version, math.inf) > event.t + _ROUNDING_S:
                    yield f"{event.generator} serves version {event.version} before it is loaded"
                served[event.generator] = event.version
            case Published():
                without = [name for name in served if loaded[name].get(event.version, math.inf) > event.t + _ROUNDING_S]
                if without:
                    yield f"version {event.version} was published without being loaded by {without}"
                if min(served.values(), default=event.version) < event.version:
                    yield f"version {event.version} was published while {served} was served"
            case StepStarted():
                behind = event.version - min(served.values(), default=event.version)
                if behind > bound:
                    yield f"step {event.step} began {behind} versions ahead, over {bound}"


def _stamps(case: _Case, lives: Mapping[str, Sequence[Mapping[int, float]]]) -> Iterator[str]:
    """A group has the version that was served when it was dispatched; `lives` say when each process loaded which."""
    asked = {event.group: event for event in case.outcome.of(Dispatched)}
    for event in case.outcome.of(Put):
        given, version = asked[event.group], event.tags["version"]
        loaded = [life[version] for life in lives[given.collector] if version in life]
        # A grant takes its time to arrive, and is stamped then.
        if min(loaded, default=0.0) > given.t + case.patience_s:
            yield f"group {event.group} of {given.t:g} s is stamped {version}, served later"


def _budget(case: _Case) -> Iterator[str]:
    """§2.7: run-ahead within its bound; a group's capacity comes back once, when it is due, and no later."""
    limit = case.outcome.config.run_ahead_groups
    if max(case.audit.run_ahead, default=0) > limit:
        yield f"{max(case.audit.run_ahead)} groups were out; the limit is {limit}"
    due = _due(case)
    back: dict[int, float] = {}
    for event in case.outcome.of(Released):
        for group in event.groups:
            if group in back:
                yield f"capacity of group {group} came back twice"
            back[group] = event.t
            if event.t < min(due.get(group, 0.0), case.end_s) - _ROUNDING_S:
                yield f"capacity of group {group} came back at {event.t:g} s, before {due[group]:g} s"
    never = sorted({event.group for event in case.outcome.of(Dispatched)} - back.keys())
    if never:
        yield f"capacity of groups {never} never came back"
    last = case.end_s - case.patience_s
    for group, when in due.items():
        if math.isfinite(when) and when < last and back.get(group, math.inf) > when + case.patience_s:
            yield f"capacity of group {group} was due at {when:g} s and came at {back.get(group, math.inf):g} s"


def _due(case: _Case) -> dict[int, float]:
    """Return when each group's capacity may come back at the earliest; infinite: with the run's end."""
    published: dict[int, float] = {}
    for event in case.outcome.of(Published):
        published.setdefault(event.version, event.t)
    empty = {event.batch: event.t for event in case.outcome.of(BatchJudged) if not event.kept}
    due: dict[int, float] = {}
    for group, when in case.settled_at.items():
        judged = case.judged.get(group)
        fates = case.audit.fates[group]
        if judged is None or (case.refills and "trained" not in fates):
            due[group] = when
        elif judged.batch in empty:
            due[group] = max(when, empty[judged.batch])
        elif judged.batch in case.step_of_batch:
            # The step's number is the version that it makes.
            due[group] = published.get(case.step_of_batch[judged.batch], math.inf)
    ended = {group for group, fates in case.audit.fates.items() if any(f.endswith(":run_ended") for f in fates)}
    return {group: when for group, when in due.items() if group not in ended}


def _batches(case: _Case) -> Iterator[str]:
    """§2.4: a batch is so many groups judged, or kept; each group is judged once."""
    size = case.outcome.config.rollout.groups_per_step
    for batch in case.outcome.of(BatchJudged):
        if batch.kept > size or (not case.refills and batch.judged > size):
            yield f"batch {batch.batch} judged {batch.judged} and kept {batch.kept} of {size}"
    twice = [group for group, n in Counter(event.group for event in case.outcome.of(Judged)).items() if n > 1]
    if twice:
        yield f"groups {twice} were judged twice"


def _wakes(case: _Case) -> Iterator[str]:
    """Invariant 9: whatever can go on goes on: notices, claims and grants come when they can."""
    # The notices of one that hung are never heard; the slow poll finds its groups, or its burial.
    hung = {event.owner for event in case.outcome.of(OwnerDead)}
    collectors = {event.group: event.collector for event in case.outcome.of(Dispatched)}
    for group, put in case.put.items():
        if collectors[group] in hung:
            continue
        row = GroupMeta(tuple(put.keys), {}).row
        happened = case.plane.put_at.get(row)
        if happened is not None and put.t > happened + case.patience_s:
            yield f"group {group} was put at {happened:g} s and noticed at {put.t:g} s"
    collector = case.outcome.config.collector
    longest_s = collector.group_timeout_s + collector.put_timeout_s + case.patience_s
    for event in case.outcome.of(Dispatched):
        heard = case.put.get(event.group)
        until = case.settled_at.get(event.group, math.inf) if heard is None else heard.t
        if until > event.t + longest_s:
            yield f"nothing was heard of group {event.group} from {event.t:g} to {until:g} s"
    yield from _idle_with_work(case)
    yield from _late_grants(case)


def _idle_with_work(case: _Case) -> Iterator[str]:
    """A batch's worth of groups does not wait for a front end that has nothing else to do."""
    config = case.outcome.config
    if case.refills or config.rollout.stale_mode == "gate":
        return
    buffered: set[int] = set()
    training, waiting_batch, judged = False, False, 0
    before = 0.0
    size = config.rollout.groups_per_step
    for event in case.outcome.events:
        idle = not training and not waiting_batch and len(buffered) >= size - judged > 0
        if idle and event.t > before + case.patience_s and event.t < case.end_s:
            yield f"{len(buffered)} groups waited from {before:g} to {event.t:g} s for nobody"
        before = event.t
        match event:
            case Put():
                buffered.add(event.group)
            case Claimed():
                buffered -= set(event.groups)
            case Judged():
                judged += 1
            case BatchJudged():
                judged = 0
                waiting_batch = event.kept > 0
            case StepStarted():
                training, waiting_batch = True, False
            case StepEnded():
                training = False


def _late_grants(case: _Case) -> Iterator[str]:
    """Capacity that is free is used, as long as there are prompts; pacing aside."""
    if case.outcome.config.rollout.pacing:
        return
    limit = case.outcome.config.run_ahead_groups
    out, free_since = 0, 0.0
    for event in case.outcome.events:
        match event:
            case Dispatched():
                if event.t > free_since + case.patience_s and event.retry_of is None:
                    yield f"group {event.group} was granted at {event.t:g} s; capacity was free at {free_since:g} s"
                out += 1
                free_since = event.t
            case Released():
                free_since = event.t if out >= limit else free_since
                out -= len(event.groups)
            case ActorRestarted() | CollectorJoined():
                free_since = max(free_since, event.t)  # There may have been nobody to grant to.
            case Published():
                free_since = max(free_since, event.t if event.version == 0 else free_since)


def _finite(case: _Case) -> Iterator[str]:
    """Invariant 10: no NaN or infinity in what the log says."""
    for event in case.outcome.events:
        if not all(map(math.isfinite, _numbers(msgspec.to_builtins(event)))):
            yield f"a number is not finite in {event}"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield float(value)
