"""Replay from Python: a run's log in, the same decisions out, or the first that differs."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from asyncrl.configs.named_code import check_code
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.running.seal import sealed_code
from asyncrl.engine.running.threads import run_beside_loop
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import Replayed
from asyncrl.engine.trace.replay import replay as replay_recording
from asyncrl.filters import BaseRolloutFilter, build_chain
from asyncrl.filters.load import check_objects, flatten_chain, object_name


def replay(
    run: str | PathLike[str], *, filters: Sequence[BaseRolloutFilter] = (), allow_code: Sequence[str] = ()
) -> Replayed:
    """Judge and plan a recorded run again: `asyncrl replay` from Python.

        assert asyncrl.replay("runs/first").difference is None

    `run` is a run's folder, or one file of its log. `filters` are new objects for those that the run was given,
    in order; one that `allow_code` names as the log does (`module:Class`), and that takes no parameters, may be left
    out. A log that breaks off is compared as far as it goes. TraceError if the log cannot be read; ConfigError for
    filters that are not the run's, and for code that only the log names.
    """
    objects = check_objects(filters)
    recording = Recording.read(Path(fspath(run)))
    config = recording.config()
    entries = _with_given(config.filters, objects)
    left = [entry for entry in entries if not isinstance(entry, BaseRolloutFilter)]
    allowed = [*allow_code, *sealed_code(Path(fspath(run)))]
    check_code({"filters": left}, recording.values(), allowed=allowed, source=f"the event log {fspath(run)}")
    chain = build_chain(entries, min_live=config.rollout.min_live)
    return run_beside_loop(lambda _: replay_recording(recording, config=config, chain=chain))


def _with_given(
    entries: Sequence[Mapping[str, Any]], objects: Sequence[BaseRolloutFilter]
) -> list[Mapping[str, Any] | BaseRolloutFilter]:
    """Return the recorded chain with each object in place of the next entry of its name."""
    left = list(objects)
    chain = [
        left.pop(0) if left and object_name(left[0]) == entry["name"] else entry for entry in flatten_chain(entries)
    ]
    if left:
        names = ", ".join(entry["name"] for entry in flatten_chain(entries)) or "none"
        raise ConfigError(f"the run has no filter {object_name(left[0])} at its place; it has {names}, in this order")
    return chain
