"""Whether the event log of a run, over all its parts, accounts for every prompt, sample and age."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.engine.events.types import AnyEvent, Dispatched, Put, Resumed, RunEnded, Settled, StepEnded, StepStarted
from asyncrl.engine.records.fate import COLLECTOR_DIED, NOT_RESTORED, RECALLED, RUN_ENDED, split_fate
from asyncrl.engine.trace.conservation import prove
from asyncrl.engine.trace.recording import Recording

_UNFINISHED = {RUN_ENDED, NOT_RESTORED, RECALLED, COLLECTOR_DIED}
"""Reasons of fates that say that a group was given up; its prompt has to come again."""


@dataclass(slots=True)
class History:
    """What a log says. `lost` and `twice` count prompts of an epoch; `faults` are in words, empty if all is right."""

    prompts: int = 0
    trained: int = 0
    resumed: int = 0
    lost: int = 0
    twice: int = 0
    faults: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path, *, prompts: int, epochs: int, max_staleness: int) -> "History":
        """Read a run that has ended after `epochs` passes over prompts 0 to `prompts` - 1."""
        events = Recording.read(directory).events
        history = cls(prompts=prompts * epochs)
        history.faults += prove(events).faults()
        history._count(events, prompts, epochs)
        history._check_ages(events, max_staleness)
        last = events[-1]
        if not isinstance(last, RunEnded) or last.code or last.keys_left:
            history.faults.append(f"the log ends with {last}")
        return history

    def _count(self, events: Iterable[AnyEvent], prompts: int, epochs: int) -> None:
        """Count how often each prompt came to an end: once per epoch, whatever was issued again."""
        groups: dict[int, int | str] = {}
        ended: dict[int, str] = {}
        repeated: set[int] = set()
        for event in events:
            match event:
                case Dispatched():
                    groups[event.group] = event.prompt
                    repeated |= set() if event.retry_of is None else {event.retry_of}
                case Settled():
                    reasons = {split_fate(fate)[1] for fate in event.fates}
                    ended[event.group] = "given up" if reasons & _UNFINISHED else "done"
                    self.trained += event.fates.count("trained")
                case Resumed():
                    self.resumed += 1
        done: Counter[int | str] = Counter()
        for group, prompt in groups.items():
            if group in repeated and ended.get(group) == "done":
                self.faults.append(f"group {group} has a fate, and its prompt {prompt} was issued again")
            if group not in repeated and ended.get(group) == "done":
                done[prompt] += 1
        for prompt in range(prompts):
            missing = epochs - done[prompt]
            self.lost += max(0, missing)
            self.twice += max(0, -missing)
            if missing:
                self.faults.append(f"prompt {prompt} came to an end {done[prompt]} times in {epochs} epochs")
        self.faults += [f"prompt {prompt} is not in the data" for prompt in done if prompt not in range(prompts)]

    def _check_ages(self, events: Iterable[AnyEvent], max_staleness: int) -> None:
        """Work out the age of every trained sample from its put and its step, and compare with what the step says."""
        born: dict[int, int] = {}
        said: Counter[str] = Counter()
        step_of: dict[int, StepStarted] = {}
        mine: Counter[int] = Counter()
        for event in events:
            match event:
                case Put():
                    born[event.group] = int(event.tags["version"])
                case StepStarted():
                    step_of.update(dict.fromkeys(event.groups, event))
                case Settled() if "trained" in event.fates:
                    age = step_of[event.group].version - born[event.group]
                    mine[age] += event.fates.count("trained")
                case StepEnded():
                    said.update(event.ages)
        if {str(age): count for age, count in mine.items()} != said:
            self.faults.append(f"the ages of trained samples are {dict(mine)}, and the steps say {said}")
        self.faults += [
            f"{n} samples of age {age} were trained" for age, n in mine.items() if not 0 <= age <= max_staleness
        ]
