"""Parts of a log, by event number, group or type, and anonymous copies that can be published."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.engine.events.types import (
    ActorRestarted,
    AnyEvent,
    Claimed,
    ClaimReturned,
    Dispatched,
    Evaluated,
    EvaluationEnded,
    Finished,
    GroupFailed,
    Judged,
    OwnerDead,
    Put,
    RanksPlaced,
    Released,
    Resumed,
    RunEnded,
    RunStarted,
    Settled,
    Span,
    StepStarted,
    digest_written,
)
from asyncrl.engine.records import group as tag

_OF_ONE_GROUP = (Dispatched, Span, Finished, Put, GroupFailed, Judged, Settled)
_OF_GROUPS = (Claimed, ClaimReturned, OwnerDead, Released, StepStarted)
_HIDDEN_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "task": {"name": "hidden", "options": {}},
    "reward": {"functions": []},
    "model": {"path": None},
    "run": {"directory": None},
    "evaluation": {"path": None, "split": None, "sets": []},
}
_KEPT_TAGS = frozenset({tag.STATUS, tag.CAUSE, "spans", "generated"})


@dataclass(frozen=True, slots=True)
class Cut:
    """Which events to keep. Bounds are inclusive; None: no limit. The first event of a run is always kept."""

    first: int | None = None
    last: int | None = None
    groups: frozenset[int] = frozenset()
    types: frozenset[str] = frozenset()

    def keeps(self, event: AnyEvent) -> bool:
        if isinstance(event, RunStarted):
            return True
        inside = (self.first is None or event.seq >= self.first) and (self.last is None or event.seq <= self.last)
        kind = not self.types or event.__struct_config__.tag in self.types
        return inside and kind and (not self.groups or bool(self.groups & set(groups_of(event))))


def groups_of(event: AnyEvent) -> Sequence[int]:
    """Return the groups that an event concerns."""
    if isinstance(event, _OF_ONE_GROUP):
        return [event.group]
    return event.groups if isinstance(event, _OF_GROUPS) else []


def write_log(path: Path, events: Iterable[AnyEvent]) -> int:
    """Write events with their numbers and times unchanged; return how many."""
    encode = msgspec.json.Encoder().encode
    count = 0
    with path.open("wb") as file:
        for event in events:
            file.write(encode(event) + b"\n")
            count += 1
    return count


def marked(events: Sequence[AnyEvent], *, of: Sequence[AnyEvent]) -> list[AnyEvent]:
    """Return a slice `of` a log, marked as `part`. A beginning lacks nothing in between and is not marked."""
    if len(events) == len(of[: len(events)]) and all(map(operator.is_, events, of)):
        return list(events)
    return [msgspec.structs.replace(e, part=True) if isinstance(e, RunStarted) else e for e in events]


class _Names:
    """New names for old ones, numbered in the order in which they occur."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self._names.setdefault(name, f"{self._prefix}{len(self._names)}")


def anonymised(events: Sequence[AnyEvent]) -> Iterator[AnyEvent]:
    """Yield events without anything about people, machines or data; the same decisions follow from them.

    Data sets, prompts, collectors and owners of claims are numbered instead of named. Errors, paths, tasks, software
    and the text of tags (except statuses) are removed. Times begin at 0. Numbers, rewards and names of filters stay.
    """
    names = _Hidden(events)
    began = events[0].wall if events else 0.0
    for event in events:
        yield msgspec.structs.replace(event, wall=round(event.wall - began, 3), **names.changes(event))


class _Hidden:
    """The new names of one log."""

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self._datasets, self._collectors = _Names("dataset"), _Names("collector")
        self._owners, self._texts, self._prompts = _Names("owner"), _Names("text"), _Names("prompt")
        granted = [event for event in events if isinstance(event, Dispatched)]
        self._known = {event.dataset for event in granted}
        self._collecting = {event.collector for event in granted}

    def changes(self, event: AnyEvent) -> dict[str, Any]:
        """Return the fields of an event that must be replaced, with their new values."""
        changes: dict[str, Any] = {name: "" for name in ("error", "path", "checkpoint") if hasattr(event, name)}
        for name in {"collector", "generator"}.intersection(event.__struct_fields__):
            changes[name] = self._collectors[getattr(event, name)]
        match event:
            case RunStarted():
                changes |= {"config": self._config(event.config), "software": {}, "process_wall": None}
            case Resumed():
                changes |= {"config": self._config(event.config)}
            case Dispatched():
                changes["dataset"] = self._datasets[event.dataset]
                changes["prompt"] = _mapped(event.prompt, self._prompts)
            case Evaluated():
                changes["dataset"] = self._datasets[event.dataset]
                changes["prompt"] = _mapped(event.prompt, self._prompts)
            case EvaluationEnded():
                changes["datasets"] = {self._datasets[name]: scores for name, scores in event.datasets.items()}
            case Put():
                tags = changes["tags"] = self._tags(event.tags)
                changes["digest"] = None if event.digest is None else digest_written(tags)
            case Judged():
                changes["digest"] = None
            case Claimed():
                owner, slash, number = event.claim.rpartition("/")
                changes["claim"] = f"{self._owners[owner]}{slash}{number}"
            case OwnerDead() | ActorRestarted():
                field = "owner" if isinstance(event, OwnerDead) else "actor"
                name = getattr(event, field)
                changes[field] = (self._collectors if name in self._collecting else self._owners)[name]
            case RanksPlaced():
                changes["nodes"] = [_mapped(node, self._texts) for node in event.nodes]
            case RunEnded() if event.code not in (0, 129, 130, 143):
                changes["reason"] = "failed"
        return changes

    def _tags(self, tags: Mapping[str, Any]) -> dict[str, Any]:
        out = {name: value if name in _KEPT_TAGS else _mapped(value, self._texts) for name, value in tags.items()}
        if tag.DATASET in tags:
            out[tag.DATASET] = self._datasets[str(tags[tag.DATASET])]
        if tag.PROMPT in tags:
            out[tag.PROMPT] = _mapped(tags[tag.PROMPT], self._prompts)
        return out

    def _config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        out = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in config.items()}
        for section, names in _HIDDEN_SETTINGS.items():
            fields = out.get(section)
            if isinstance(fields, dict):
                fields.update({name: value for name, value in names.items() if name in fields})
        filters = out.get("filters")
        if isinstance(filters, list):
            out["filters"] = [self._filter(entry) for entry in filters]
        return out

    def _filter(self, value: Any) -> Any:
        """Rename the data sets in a filter's parameters."""
        if isinstance(value, dict):
            return {self._filter(key): self._filter(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filter(item) for item in value]
        return self._datasets[value] if isinstance(value, str) and value in self._known else value


def _mapped(value: Any, texts: _Names) -> Any:
    if isinstance(value, list):
        return [_mapped(item, texts) for item in value]
    return texts[value] if isinstance(value, str) else value
