"""The checkpoints of a run: when one is made, and how it gets to disk beside training.

The cut. A checkpoint holds the run at one moment between two steps: the trainer has closed a batch, which has its fate
and its version, and has not taken the next one. At that moment nothing is in training. All that the loop knows is
written down in one go, without a chance for another task to run: it is consistent by construction. It says of each
group without a fate where it is: *buffered* and *claimed* groups are kept with their rows, and so is the batch that is
in the making or waits for the trainer; groups *in flight* are kept as prompts, which a resumed run issues again. The
event `checkpointed` marks the cut in the log; a resumed run voids what comes after it.

Training then waits while the ranks copy weights and moments to the host's memory. The files are written beside the next
steps. Rows that belong to the cut stay in the data plane until they are copied.

Invariant: one checkpoint at a time, and none of them ends training; the folder of the last whole one stays until the
next one is whole.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from safetensors import SafetensorError

from asyncrl.configs import RunConfig
from asyncrl.engine.aio.blocking import Blocking
from asyncrl.engine.checkpoint import folder as on_disk
from asyncrl.engine.checkpoint.state import RunState, write_state
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.snapshot import Snapshot
from asyncrl.engine.deployment import PARTITION, Deployment, StateHolder
from asyncrl.engine.errors import AsyncRLError, Overdue, VersionError
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Checkpointed
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.ending import Ending, first_cause

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where checkpoints go, and how often; None: never. `run` is the text of `run.json`."""

    directory: Path
    every_steps: int | None
    every_s: float | None
    at_end: bool
    keep: int
    timeout_s: float
    run: str

    @classmethod
    def of(cls, config: RunConfig, directory: Path, *, run: str) -> "CheckpointSettings":
        """Take what a run's configuration says; `directory` is the run's."""
        wanted = config.checkpoint
        return cls(
            directory / on_disk.FOLDER,
            every_steps=wanted.every_steps,
            every_s=wanted.every_s,
            at_end=wanted.at_end,
            keep=wanted.keep,
            timeout_s=wanted.timeout_s,
            run=run,
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """One moment of the run, at second `at` of the log. `over` ends the wait of those who would clear its rows."""

    version: int
    at: float
    after: int
    state: str
    groups: Sequence[GroupMeta]
    over: Callable[[], None]


class Checkpointer:
    """Makes checkpoints of a deployment. `blocking` is how files are written."""

    def __init__(
        self, settings: CheckpointSettings, deployment: Deployment, *, events: EventLog, blocking: Blocking[Any]
    ) -> None:
        self._settings = settings
        self._plane: DataPlane = deployment.plane
        self._ranks: Sequence[StateHolder] = deployment.states
        self._events = events
        self._blocking = blocking
        self._busy = False
        self._last_version = 0
        self._last_s = events.now
        self._waited_s = 0.0
        self._attempts = 0
        self._made = 0
        self._failures: list[str] = []
        self._finishing = False

    @property
    def finishing(self) -> bool:
        """Whether the last checkpoint is being written, for which the end of the run waits."""
        return self._finishing

    def resumed(self, version: int) -> None:
        """Note that the run goes on from the checkpoint of a version."""
        self._last_version = version

    async def after_step(self, version: int, take: Callable[[], RunState], groups: Groups, tasks: TaskGroup) -> None:
        """Make a checkpoint of the run as `take` tells it, if one is due; files are written in `tasks`.

        While the last one is still being written none is made: the next step will find it due.
        """
        if self._busy or not self._is_due(version):
            return
        cut = await self._attempt(partial(self._hold, take, groups))
        if cut is not None:
            self._busy = True
            tasks.start_soon(self._write, cut)

    async def finish(self, ending: Ending, take: Callable[[], RunState], groups: Groups, *, version: int) -> None:
        """Make the last checkpoint, with what is not trained yet. A run that failed, or took no step, makes none."""
        if not self._settings.at_end or ending.code == 1 or not version:
            return
        self._finishing = True
        with anyio.CancelScope(shield=True):
            cut = await self._attempt(partial(self._hold, take, groups))
            if cut is not None:
                await self._write(cut)

    def _is_due(self, version: int) -> bool:
        steps, seconds = self._settings.every_steps, self._settings.every_s
        due_by_steps = steps is not None and version - self._last_version >= steps
        return due_by_steps or (seconds is not None and self._events.now - self._last_s >= seconds)

    async def _hold(self, take: Callable[[], RunState], groups: Groups) -> _Cut:
        """Take the cut, and have every rank copy its state."""
        state = take()
        text, version = write_state(state), state.core.version
        held = [group for group in state.core.groups if group.place != "in_flight"]
        self._last_version, self._last_s = version, self._events.now
        self._events.append(Checkpointed(path=f"{on_disk.FOLDER}/{on_disk.name_of(version)}", version=version))
        metas, over = [group.meta for group in held], groups.copying(held)
        cut = _Cut(version, self._last_s, self._events.seq, text, metas, over)
        try:
            await _each(self._ranks, partial(_hold_at, version))
        except BaseException:
            cut.over()
            raise
        self._waited_s = self._events.now - cut.at
        return cut

    async def _write(self, cut: _Cut) -> None:
        self._busy = True
        try:
            await self._attempt(partial(self._save, cut))
        finally:
            cut.over()
            self._busy = False

    async def _save(self, cut: _Cut) -> None:
        directory, blocking, keep = self._settings.directory, self._blocking, self._settings.keep
        folder = directory / on_disk.name_of(cut.version)
        self._attempts += 1
        attempt = self._attempts
        new = await blocking(lambda: on_disk.begin(folder, attempt=attempt))
        try:
            await self._fill(new, cut)
            # A thread that nobody waits for would rename the folder later, when its files are removed.
            with anyio.CancelScope(shield=True):
                await blocking(lambda: on_disk.finish(new, folder, version=cut.version, after=cut.after))
        except BaseException:
            # Each failure would leave its files, and on a full disk the event log has no room beside them.
            on_disk.discard(new)
            raise
        await blocking(lambda: on_disk.prune(directory, keep=keep))
        self._made += 1
        log.info(
            "a checkpoint is made",
            version=cut.version,
            folder=str(folder),
            groups=len(cut.groups),
            training_waited_s=round(self._waited_s, 3),
            seconds=round(self._events.now - cut.at, 3),
        )

    async def _fill(self, new: Path, cut: _Cut) -> None:
        """Write all files but the manifest, and wait for the log."""
        try:
            snapshot = await Snapshot.take(self._plane, PARTITION, cut.groups)
        finally:
            cut.over()
        await self._blocking(lambda: snapshot.write(new / on_disk.GROUPS))
        await _each(self._ranks, lambda rank: rank.save_state(str(new / on_disk.TRAINER)))

        def finish() -> None:
            (new / on_disk.STATE).write_text(cut.state, encoding="utf-8")
            (new / on_disk.RUN).write_text(self._settings.run, encoding="utf-8")
            # A log that ends before the cut could not be continued from it.
            self._events.wait_written(self._settings.timeout_s)

        await self._blocking(finish)

    async def _attempt(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a part of a checkpoint; None, with a warning, if it fails: training goes on."""
        limit_s = self._settings.timeout_s
        with anyio.move_on_after(limit_s) as limit:
            try:
                return await call()
            except (AsyncRLError, OSError, RuntimeError, TypeError, SafetensorError, ExceptionGroup) as error:
                cause = first_cause(error)
                if isinstance(error, ExceptionGroup) and not isinstance(cause, AsyncRLError | OSError | RuntimeError):
                    raise
                self._fail(cause)
        if limit.cancelled_caught:
            self._fail(Overdue(f"the checkpoint was not made within {limit_s:g} s (checkpoint.timeout_s)"))
        return None

    def _fail(self, error: BaseException) -> None:
        self._failures.append(str(error))
        log.warning("a checkpoint could not be made", error=str(error), failed_checkpoints=len(self._failures))

    def summary(self) -> Mapping[str, int]:
        """Return how many checkpoints were made, and how many failed."""
        return {"made": self._made, "failed": len(self._failures)}


async def _each(ranks: Sequence[StateHolder], call: Callable[[StateHolder], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for rank in ranks:
            tasks.start_soon(call, rank)


async def _hold_at(version: int, rank: StateHolder) -> None:
    held = await rank.hold_state()
    if held != version:
        raise VersionError(f"a rank holds the state of version {held}, and the trainer is at {version}")
