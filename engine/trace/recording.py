"""A recorded run: its events in order, and its configuration."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from asyncrl.configs import Override, RunConfig, load
from asyncrl.configs.load import DEFAULT_PRESET, FREE, RENAMED
from asyncrl.configs.named_code import check_code
from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import effective_events, located_events
from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    CollectorAdded,
    Dispatched,
    Put,
    Resumed,
    RunEnded,
    RunStarted,
)
from asyncrl.engine.records import group as tag
from asyncrl.engine.trace.untyped import check_untyped
from asyncrl.filters import Chain, build_chain
from asyncrl.trainers.cost.model import CostModel
from asyncrl.trainers.fan_out import Cost

_TAGS = frozenset(
    (
        tag.GROUP,
        tag.VERSION,
        tag.PROMPT_TOKENS,
        tag.RESPONSE_TOKENS,
        tag.TRAINABLE_TOKENS,
        tag.REWARD,
        tag.STATUS,
        tag.CAUSE,
    )
)


@dataclass(frozen=True, slots=True)
class Recording:
    """The events that count, without those that a resume voided."""

    events: Sequence[AnyEvent]

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Read a run folder or one log file; all commands use this reader.

        TraceError, with file and line if one is wrong, if the log does not exist, cannot be read, is empty or lacks a
        line. A slice may lack events, and a log may break off: see `require_whole`.
        """
        try:
            _check(located_events(path))
            events = list(effective_events(path))
        except OSError as error:
            raise TraceError(f"{path} cannot be read as an event log: {error}") from error
        except TraceError as error:
            raise TraceError(f"{path} is not a complete event log: {error}") from error
        if not events:
            raise TraceError(f"{path} is an empty event log: it holds no event")
        return cls(events)

    def require_whole(self, what: str) -> None:
        """TraceError if the log lacks its beginning or is a slice; `what` names what needs all events."""
        first = self.events[0]
        if self.started is not first:
            raise TraceError(f"the log is not whole: it begins with event {first.seq}; {what} needs all events")
        if self.started.part:
            raise TraceError(f"the log is not whole: it is a slice of a run's; {what} needs all events")

    def require_tags(self, what: str) -> None:
        """TraceError, with event and tag, if a put lacks a tag from which decisions are made."""
        for event in self.events:
            lacking = sorted(_TAGS - event.tags.keys()) if isinstance(event, Put) else []
            if lacking:
                raise TraceError(f"event {event.seq}, {what} needs tag {lacking[0]!r}, which this put does not have")

    @property
    def breaks_off(self) -> str:
        """Where the log breaks off, in words; empty if it has its end."""
        if self.ended is not None:
            return ""
        return f"the log is not whole: it breaks off after event {self.events[-1].seq}, before its run_ended"

    @property
    def started(self) -> RunStarted:
        """The event with configuration and software; TraceError if it is missing."""
        found = next((event for event in self.events if isinstance(event, RunStarted)), None)
        if found is None:
            raise TraceError("the log has no run_started event, so its configuration is not known")
        return found

    @property
    def ended(self) -> RunEnded | None:
        """The event that says how the run ended; None if the log breaks off."""
        last = self.events[-1]
        return last if isinstance(last, RunEnded) else None

    @property
    def generators(self) -> list[str]:
        """Every generator that a log began with and names before it was resumed, in alphabetical order."""
        return self.generators_after(0)

    def generators_after(self, seq: int) -> list[str]:
        """Return the generators named after an event, up to the next resume, in alphabetical order.

        Those that were added later are left out: nobody waited for them before.
        """
        later = (event for event in self.events if event.seq > seq)
        part = list(takewhile(lambda event: not isinstance(event, Resumed), later))
        named = {event.generator for event in part if isinstance(event, Acknowledged)}
        added = {event.collector for event in part if isinstance(event, CollectorAdded)}
        return sorted((named | {event.collector for event in part if isinstance(event, Dispatched)}) - added)

    @property
    def cost(self) -> Cost | None:
        """The cost by which the run's plans were balanced; None: tokens."""
        started = next((event for event in self.events if isinstance(event, RunStarted)), None)
        if started is None or started.cost is None:
            return None
        try:
            # Older logs have more fields, of which every run had the defaults.
            return CostModel(started.cost["linear"], tuple(map(tuple, started.cost["attention"]))).flops
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"event {started.seq}, run_started: its cost model cannot be read: {error!r}") from error

    def config(self, overrides: Sequence[Override] = (), filters: Sequence[str] = ()) -> RunConfig:
        """Return the recorded configuration under `overrides`, with `filters` appended to its chain.

        A key that did not exist when the log was written has its default. ConfigError as in `load`.
        """
        return load(DEFAULT_PRESET, [*self.values(), *overrides], filters).config

    def chain(self, config: RunConfig, allow_code: Sequence[str] = ()) -> Chain:
        """Build the filters of a configuration that came of this log's.

        ConfigError if one of them is code that the log names and `allow_code` does not: the log may be another's.
        """
        check_code({"filters": config.filters}, self.values(), allowed=allow_code, source="the event log")
        return build_chain(config.filters, min_live=config.rollout.min_live)

    def values(self, source: str = "the recorded configuration") -> list[Override]:
        """Return the recorded configuration as overrides that say where they are from."""
        return recorded_values(self.started.config, source)


def recorded_values(config: Mapping[str, Any], source: str) -> list[Override]:
    """Return a configuration as it was recorded, by this asyncrl or an older one, as overrides."""
    # fetch_policy had no effect, and values that it could have then are refused by now.
    return [
        Override(RENAMED.get(path, path), value, source)
        for path, value in _leaves(config)
        if path != "trainer.fetch_policy"
    ]


def follows(last: AnyEvent, event: AnyEvent) -> bool:
    """Whether `event` is the next after `last`: its number is one higher, or only voided events lie in between."""
    return event.seq == last.seq + 1 or (isinstance(event, Resumed) and event.after == last.seq < event.seq)


def _check(located: Iterable[tuple[str, AnyEvent]]) -> None:
    """TraceError, with file and line, if a line is missing or tags cannot be those of a run."""
    last: AnyEvent | None = None
    part = False
    for where, event in located:
        part = part or (isinstance(event, RunStarted) and event.part)
        if last is not None and not follows(last, event) and not (part and event.seq > last.seq):
            raise TraceError(
                f"{where}: event {event.seq} follows event {last.seq}; numbers go up by one, so a line is missing"
            )
        try:
            check_untyped(event)
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from error
        last = event


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in FREE:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
