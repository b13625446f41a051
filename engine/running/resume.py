"""A run that is resumed: its newest whole checkpoint, its configuration, and what may differ from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from asyncrl.configs import Loaded, Override, flatten, load
from asyncrl.configs.load import DEFAULT_PRESET
from asyncrl.configs.named_code import check_code, code_of
from asyncrl.engine.checkpoint import folder as on_disk
from asyncrl.engine.checkpoint.state import read_run, read_state
from asyncrl.engine.errors import CheckpointBroken, ConfigError, TraceError
from asyncrl.engine.events.lock import LogLock
from asyncrl.engine.events.log import FILE_NAME, read_events
from asyncrl.engine.events.segments import segment_files
from asyncrl.engine.events.types import Checkpointed, RunStarted
from asyncrl.engine.lifecycle.process_env import cluster_address
from asyncrl.engine.loop.saved import Saved
from asyncrl.engine.running.cluster_checks import OF_ANY_RUN
from asyncrl.engine.running.harmless import HARMLESS, NOT_TAKEN, RESUMED
from asyncrl.engine.running.seal import sealed_code
from asyncrl.engine.trace.recording import recorded_values
from asyncrl.filters import BaseRolloutFilter
from asyncrl.filters.load import object_name

RUNS = Path("runs")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a run goes on from. Without `saved` it begins anew: it was stopped before its first checkpoint.

    `after` is the number of the last event that counts; `config` what was in force. `attempt` counts the attempts of
    the command that goes on by itself, after a failure with this `cause`.
    """

    directory: Path
    after: int
    saved: Saved | None
    config: Mapping[str, Any]
    warnings: Sequence[str] = ()
    attempt: int = 1
    cause: str = ""

    @property
    def checkpoint(self) -> str:
        """The checkpoint's folder in the run's; empty without one."""
        return "" if self.saved is None else f"{on_disk.FOLDER}/{self.saved.folder.name}"

    def warn(self) -> None:
        """Log what failed before, and what was found to be broken, once there is a log."""
        if self.cause:
            structlog.get_logger().warning(
                "the run goes on after a failure", attempt=self.attempt, cause=self.cause, checkpoint=self.checkpoint
            )
        for warning in self.warnings:
            structlog.get_logger().warning("a checkpoint is broken; an older one stands in for it", why=warning)


def newest_run(runs: Path = RUNS) -> Path:
    """Return the folder of the run that was last written to; ConfigError if there is none."""
    logs = [path / FILE_NAME for path in runs.glob("*") if (path / FILE_NAME).is_file()]
    if not logs:
        raise ConfigError(f"--resume {AUTO}: {runs}/ holds no run; name the folder of one")
    return max(logs, key=lambda path: path.stat().st_mtime).parent


def find(directory: Path) -> Resumption:
    """Return what the run in a folder goes on from. A broken checkpoint is passed over, and set aside.

    ConfigError without a run in it, or if all of its checkpoints are broken.
    """
    try:
        segment_files(directory)
    except FileNotFoundError as error:
        raise ConfigError(f"--resume {directory}: {error}") from error
    _check_free(directory)
    broken: list[str] = []
    checkpoints = on_disk.newest_first(directory / on_disk.FOLDER)
    for folder in checkpoints:
        try:
            found = _read(directory, folder)
        except CheckpointBroken as error:
            broken.append(str(error))
            continue
        # What is done from here on makes the newer ones those of another history.
        for passed in checkpoints[: len(broken)]:
            on_disk.set_aside(passed)
        return replace(found, warnings=tuple(broken))
    if broken:
        raise ConfigError(f"--resume {directory}: none of its checkpoints is whole: {'; '.join(broken)}")
    started = _event(directory, 1)
    if not isinstance(started, RunStarted):
        raise ConfigError(f"--resume {directory}: it has no checkpoint, and its log does not say what was run")
    return Resumption(directory, 1, None, started.config)


def _check_free(directory: Path) -> None:
    """ConfigError, with its name, if a process is still at this run: its checkpoints are its own."""
    try:
        LogLock(directory / FILE_NAME).release()
    except TraceError as error:
        raise ConfigError(f"--resume {directory}: {error}") from error


def _read(directory: Path, folder: Path) -> Resumption:
    manifest = on_disk.check(folder)
    state = read_state(on_disk.read_json(folder / on_disk.STATE))
    run = read_run(on_disk.read_json(folder / on_disk.RUN))
    cut = _event(directory, manifest.after)
    if not isinstance(cut, Checkpointed) or cut.version != manifest.version:
        raise CheckpointBroken(f"{folder} ends with event {manifest.after}, and the log has no such checkpoint there")
    return Resumption(directory, manifest.after, Saved(folder.absolute(), state), run.config)


def _event(directory: Path, number: int) -> Any:
    """Return an event of the log by its number; None if it is not there."""
    try:
        return next((event for event in read_events(directory) if event.seq == number), None)
    except TraceError as error:
        raise ConfigError(f"--resume {directory}: its event log cannot be read: {error}") from error


def resumed_config(
    found: Resumption,
    overrides: Sequence[Override],
    filters: Sequence[BaseRolloutFilter] = (),
    *,
    allow_code: Sequence[str] = (),
) -> Loaded:
    """Return the configuration of the run with `overrides` on top; `filters` are the objects that it was given.

    A run that joined a cluster, and now joins none, goes on with a cluster of its own, and with the defaults of what is
    for a cluster that is joined. ConfigError if it names code that neither `overrides` nor `allow_code` does: the
    folder may be another's.
    """
    values = recorded_values(found.config, RESUMED)
    # Where a run goes is said by who starts it: the folder may be another's, and lead to a cluster of theirs.
    values = [value for value in values if value.path not in NOT_TAKEN]
    chain = list(next(value.value for value in values if value.path == "filters"))
    for given in filters:
        name = object_name(given)
        at = next((i for i, entry in enumerate(chain) if entry.get("name") == name), None)
        if at is None:
            raise ConfigError(f"the run that is resumed has no filter {name}; it has {[e.get('name') for e in chain]}")
        del chain[at]
    if filters:
        values = [Override(v.path, chain, v.source) if v.path == "filters" else v for v in values]
    loaded = load(DEFAULT_PRESET, [*values, *overrides])
    if cluster_address(loaded.config) is None:
        values = [v for v in values if not v.path.startswith("cluster.") or v.path in OF_ANY_RUN]
        loaded = load(DEFAULT_PRESET, [*values, *overrides])
    allowed = [*allow_code, *code_of(overrides), *sealed_code(found.directory)]
    check_code(flatten(loaded.config), values, allowed=allowed, source=f"the run {found.directory}")
    return loaded


def check_same_folder(found: Resumption, loaded: Loaded) -> None:
    """ConfigError, with both folders, if another one than the run's own is configured for it."""
    given, source = loaded.config.run.directory, loaded.sources["run.directory"]
    # What the run itself recorded may be where it was before it was moved.
    if given is None or source == RESUMED or Path(given).resolve() == found.directory.resolve():
        return
    raise ConfigError(
        f"--resume {found.directory}: the run goes on in its own folder, and run.directory (from {source}) is "
        f"{given!r}; leave that out"
    )


def check_changes(found: Resumption, config: Mapping[str, Any], *, prompts: int) -> list[str]:
    """Return how the configuration differs from the run's, as `key: old -> new`.

    ConfigError, with all differences, for one that would change what is learned, and for other data.
    """
    old = {value.path: value.value for value in recorded_values(found.config, "")}
    new = {value.path: value.value for value in recorded_values(config, "")}
    changed = {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in new if old.get(key, new[key]) != new[key]}
    refused = [text for key, text in changed.items() if not key.startswith(HARMLESS)]
    if refused:
        raise ConfigError(
            f"--resume {found.directory}: the run cannot go on with another {'; '.join(refused)}. Leave that as it "
            "was, or start a new run (from the saved model: model.path)"
        )
    if found.saved is not None and found.saved.state.prompts.count != prompts:
        raise ConfigError(
            f"--resume {found.directory}: the data has {prompts} prompts, and had "
            f"{found.saved.state.prompts.count} when the checkpoint was made; the run cannot find its place in them"
        )
    return list(changed.values())
