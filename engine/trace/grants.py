"""What the dispatcher may do, by the log: which prompt comes when, within run-ahead, and when capacity comes back.

It trusts the order of events and the configuration, and none of the run's own folds. Which collector is
granted a group, and how soon, it does not ask. DESIGN.md, 2.7, has the rule of capacity.
"""

import random
from collections import deque
from collections.abc import Iterator

from asyncrl.configs import RunConfig
from asyncrl.engine.events.types import (
    AnyEvent,
    BatchGivenUp,
    BatchJudged,
    BatchTaken,
    Claimed,
    ClaimReturned,
    Dispatched,
    GroupFailed,
    Judged,
    OwnerDead,
    Planned,
    Published,
    Put,
    Released,
    RunEnded,
    Settled,
    StepStarted,
)
from asyncrl.engine.records.fate import CANCELLED, COLLECTOR_DIED, RECALLED, RUN_ENDED, STALE, TRAINED, dropped, failed

_Prompt = tuple[str, int | str]


class Order:
    """The order of prompts: each epoch is all of them, shuffled by seed and epoch (engine/loop/prompt_source.py).

    The first epoch tells which there are and how the task lists them, so that every later one is known.
    A prompt that failed before may be left out.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first: list[_Prompt] = []
        self._listed: list[_Prompt] = []
        self._epoch = 0
        self._ahead: deque[_Prompt] = deque()
        self.failed: set[_Prompt] = set()

    def take(self, prompt: _Prompt) -> bool:
        """Whether this prompt may come now."""
        if not self._listed:
            if prompt not in self._first:
                self._first.append(prompt)
                return True
            self._listed = [self._first[0]] * len(self._first)
            for place, at in enumerate(self._shuffled(0)):
                self._listed[at] = self._first[place]
        while True:
            if not self._ahead:
                self._epoch += 1
                self._ahead.extend(self._listed[at] for at in self._shuffled(self._epoch))
            expected = self._ahead.popleft()
            if expected == prompt:
                return True
            if expected not in self.failed:
                return False

    def _shuffled(self, epoch: int) -> list[int]:
        places = list(range(len(self._first)))
        random.Random(f"{self._seed}/{epoch}").shuffle(places)
        return places


class Grants:
    """A fold; each event yields what it says and may not. `lost_first`: lost prompts come before new ones.

    With the run's end, by event `final`, all capacity comes back.
    """

    def __init__(self, config: RunConfig, *, refill: bool, lost_first: bool, final: AnyEvent | None = None) -> None:
        self._final = final
        self._config = config
        self._refill = refill
        self._lost_first = lost_first
        # The order of data sets is one of lines, of which a log does not name those left out.
        self._order = None if config.data.given else Order(config.run.seed)
        self._groups: dict[int, Dispatched] = {}
        self._tries: dict[int, int] = {}
        self._lost: deque[int] = deque()
        self._out: set[int] = set()
        self._buffered: set[int] = set()
        self._waits = False
        self._batch_of: dict[int, int] = {}
        self._settled: dict[int, bool] = {}
        self._step_of: dict[int, int] = {}
        self._over: set[int] = set()
        self._published = -1
        self._due_at_step: set[int] = set()

    def apply(self, event: AnyEvent) -> Iterator[str]:
        match event:
            case Dispatched():
                yield from self._dispatch(event)
            case Released():
                yield from self._release(event)
            case RunEnded() if event.code in (0, 130) and self._due_at_step & self._out:
                yield f"capacity of groups {sorted(self._due_at_step & self._out)[:5]} was due and never came back"
        self._follow_groups(event)
        self._follow_batches(event)

    def _follow_groups(self, event: AnyEvent) -> None:
        match event:
            case GroupFailed() if event.group in self._groups and self._order is not None:
                if event.reason != COLLECTOR_DIED:
                    self._order.failed.add(_prompt(self._groups[event.group]))
            case Put():
                self._buffered.add(event.group)
            case Claimed():
                self._buffered.difference_update(event.groups)
            case ClaimReturned() | OwnerDead():
                self._buffered.update(event.groups)
                for group in event.groups:
                    self._batch_of.pop(group, None)
            case Judged():
                self._batch_of[event.group] = event.batch
            case Settled() if event.group in self._groups:
                self._settle(event)

    def _follow_batches(self, event: AnyEvent) -> None:
        match event:
            case BatchJudged():
                self._waits = event.kept > 0
                if not event.kept:
                    self._over.add(event.batch)
            case BatchTaken():
                self._waits = False
            case BatchGivenUp():
                self._over.add(event.batch)
            case Planned():
                self._step_of[event.batch] = event.step
            case StepStarted():
                self._due_at_step = {group for group in self._out if self._is_due(group)}
            case Published():
                self._published = event.version

    def _dispatch(self, event: Dispatched) -> Iterator[str]:
        config, rollout = self._config, self._config.rollout
        if event.group != len(self._groups):
            yield f"its number follows {len(self._groups) - 1}; numbers go up by one"
        if len(self._out) >= config.run_ahead_groups:
            yield f"{len(self._out)} groups are out, and run-ahead is {config.run_ahead_groups}"
        if (event.size, event.seed) != (rollout.group_size, config.run.seed):
            yield (
                f"size {event.size} and seed {event.seed}; the configuration has {rollout.group_size} "
                f"and {config.run.seed}"
            )
        if rollout.pacing and (self._waits or len(self._buffered) >= rollout.groups_per_step):
            yield "a whole batch waits, and rollout.pacing holds grants back"
        if event.retry_of is not None:
            yield from self._retry(event, event.retry_of)
        elif self._lost and self._lost_first:
            yield f"the prompt of group {self._lost[0]}, which was lost to age, comes first"
        elif self._order is not None and not self._order.take(_prompt(event)):
            yield f"prompt {event.prompt} is not next by seed and epoch"
        self._groups[event.group] = event
        self._tries[event.group] = 0 if event.retry_of is None else 1 + self._tries.get(event.retry_of, 0)
        self._out.add(event.group)

    def _retry(self, event: Dispatched, lost: int) -> Iterator[str]:
        if not self._lost or self._lost[0] != lost:
            yield f"it is a retry of group {lost}, and next is {f'group {self._lost[0]}' if self._lost else 'none'}"
        if lost in self._lost:
            self._lost.remove(lost)
            if _prompt(self._groups[lost]) != _prompt(event):
                yield f"it is a retry of group {lost}, which had prompt {self._groups[lost].prompt}"

    def _settle(self, event: Settled) -> None:
        self._settled[event.group] = TRAINED in event.fates
        if dropped(RUN_ENDED) in event.fates:
            self._batch_of.pop(event.group, None)
        self._buffered.discard(event.group)
        lost = dropped(STALE) in event.fates or dropped(CANCELLED) in event.fates
        recalled = dropped(RECALLED) in event.fates or failed(COLLECTOR_DIED) in event.fates
        if recalled:
            self._tries[event.group] -= 1
        if recalled or (lost and self._tries[event.group] < self._config.rollout.requeue_tries):
            self._lost.append(event.group)

    def _is_due(self, group: int) -> bool:
        """Whether the capacity of a group may come back, by what has happened so far."""
        batch = self._batch_of.get(group)
        if batch is None or (self._refill and not self._settled.get(group, True)):
            return group in self._settled
        # A step's number is the version that it makes.
        return batch in self._over or self._step_of.get(batch, self._published + 1) <= self._published

    def _release(self, event: Released) -> Iterator[str]:
        early = [group for group in event.groups if group in self._out and not self._is_due(group)]
        if early and event is not self._final:
            yield f"capacity of groups {early[:5]} came back before it was due"
        twice = [group for group in event.groups if group not in self._out]
        if twice:
            yield f"groups {twice[:5]} held no capacity"
        self._out.difference_update(event.groups)


def _prompt(event: Dispatched) -> _Prompt:
    return event.dataset, event.prompt
