"""A recorded run: its events in order, and the configuration under which they came about."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.configs import Override, RunConfig, load
from asyncrl.configs.load import DEFAULT_PRESET
from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.log import effective_events
from asyncrl.engine.events.types import AnyEvent, RunEnded, RunStarted
from asyncrl.trainers.cost_model import CostModel
from asyncrl.trainers.fan_out import Cost


@dataclass(frozen=True, slots=True)
class Recording:
    """The events that count, without those that a resume made void."""

    events: Sequence[AnyEvent]

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Read a run folder or one log file; TraceError if it is not there, is no log, or holds no event."""
        try:
            events = list(effective_events(path))
        except OSError as error:
            raise TraceError(f"{path} cannot be read as an event log: {error}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"{path} is no whole event log: {error}") from error
        if not events:
            raise TraceError(f"{path} is an empty event log: it holds no event")
        return cls(events)

    @property
    def started(self) -> RunStarted:
        """The event that tells configuration and software; TraceError if it is missing."""
        found = next((event for event in self.events if isinstance(event, RunStarted)), None)
        if found is None:
            raise TraceError("the log has no run_started event, so its configuration is not known")
        return found

    @property
    def ended(self) -> RunEnded | None:
        """How the run ended; None for a log that breaks off."""
        return next((event for event in reversed(self.events) if isinstance(event, RunEnded)), None)

    @property
    def cost(self) -> Cost | None:
        """What the run's plans were balanced by; None for tokens."""
        started = next((event for event in self.events if isinstance(event, RunStarted)), None)
        if started is None or started.cost is None:
            return None
        fields = {**started.cost, "attention": tuple(map(tuple, started.cost["attention"]))}
        return CostModel(**fields).flops

    def config(self, overrides: Sequence[Override] = (), filters: Sequence[str] = ()) -> RunConfig:
        """Return the recorded configuration under `overrides`, with `filters` appended to its chain.

        A value that came with a later asyncrl than the log has its default. ConfigError as in `load`.
        """
        return load(DEFAULT_PRESET, [*self.values(), *overrides], filters).config

    def values(self, source: str = "the recorded configuration") -> list[Override]:
        """Return the recorded configuration as overrides that say where they are from."""
        return [Override(path, value, source) for path, value in _leaves(self.started.config)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path != "task.options":
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
