"""What a run learns, on disk: when it is saved, under which name, and what a save that fails costs.

Invariant: one save at a time, and none of them ends training. A step waits only while the weights are copied to the
host's memory, and for the end of the last save where that is not over yet.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from asyncrl.configs import RunConfig
from asyncrl.engine.deployment import ModelHolder
from asyncrl.engine.errors import AsyncRLError, ConfigError, Overdue
from asyncrl.engine.events.means import Means
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.model.folder import BEST, EVALUATED, LAST, Note, copy_saved, find_folder, remove_saved
from asyncrl.engine.records.ending import Ending, failure
from asyncrl.engine.records.scores import Scores

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SaverSettings:
    """Where and how often a run saves: after `every` steps (None: at the end alone), and the best of those if `best`.

    With `by_evaluation` the best is that of the versions that are evaluated. `config` is the SHA-256 of the run's
    configuration.
    """

    directory: Path
    every: int | None
    best: bool
    reward_window: int
    timeout_s: float
    config: str
    by_evaluation: bool = False

    @property
    def best_by(self) -> str | None:
        """What the best is chosen by; None if none is kept."""
        return ("evaluation" if self.by_evaluation else "reward") if self.best else None

    @classmethod
    def of(cls, config: RunConfig, directory: Path, digest: str) -> "SaverSettings":
        """Take what a run's configuration says; `digest` is its own, as it is logged."""
        run, evaluated = config.run, config.evaluation.every is not None
        return cls(
            directory=directory,
            every=run.save_every,
            best=run.save_best and (evaluated or run.save_every is not None),
            by_evaluation=evaluated,
            reward_window=run.reward_window,
            timeout_s=run.save_timeout_s,
            config=digest,
        )


class ModelSaver:
    """Has `holder`, a rank with a whole replica, save its weights. `progress` has the rewards so far."""

    def __init__(self, settings: SaverSettings, holder: ModelHolder, progress: Progress) -> None:
        self._settings = settings
        self._holder = holder
        self._progress = progress
        self._under_way: anyio.Event | None = None
        self._saved: dict[str, Note] = {}
        self._figures: dict[int, tuple[float, float]] = {}
        self._errors: list[Exception] = []
        self._finishing = False

    @property
    def finishing(self) -> bool:
        """Whether the last version is being saved, which is all that the run still does."""
        return self._finishing

    def resumed(self, version: int) -> None:
        """Go on from the checkpoint of a version: the best model so far is the one on disk, if it is not a later one.

        A later one is of a history that was given up, and another model will have its version.
        """
        folder = find_folder(self._settings.directory / BEST)
        try:
            note = None if folder is None else Note.read(folder)
        except ConfigError as error:
            log.warning("the best model so far cannot be told", error=str(error))
            return
        if note is None or note.version > version:
            return
        if self._settings.best_by != "evaluation":
            self._saved[BEST] = note
        elif note.evaluation is not None:
            self._saved[BEST] = note
            self._figures[note.version] = note.evaluation["pass_at_1"], note.evaluation["reward"]

    async def after_step(self, version: int, tasks: TaskGroup, *, evaluated: bool = False) -> None:
        """Save the version that a step has made, if it is due; the writing goes on in `tasks`.

        One that is `evaluated` meanwhile is saved aside: it is the best, or not, once its scores are known.
        """
        settings = self._settings
        names = [LAST] if settings.every is not None and version % settings.every == 0 else []
        if evaluated and settings.best_by == "evaluation":
            names.append(EVALUATED)
        if not names:
            return
        if self._under_way is not None:
            await self._under_way.wait()  # It ends by its own deadline.
        note = await self._attempt(self._hold, self._settings.timeout_s)
        if note is not None:
            self._under_way = anyio.Event()
            tasks.start_soon(self._write, note, names, self._under_way)

    async def written(self) -> None:
        """Wait for the end of the save under way, if what it saves may turn out to be the best."""
        if self._under_way is not None and self._settings.best_by == "evaluation":
            await self._under_way.wait()  # It ends by its own deadline.

    async def note_scores(self, version: int, scores: Scores) -> None:
        """Note what an evaluation came to: a version is better by pass@1, and of equals by the mean reward."""
        if scores.pass_at_1 is not None and scores.reward is not None:
            self._figures[version] = scores.pass_at_1, scores.reward.value
            self._keep_if_best(version)

    async def finish(self, ending: Ending, *, version: int, stop_s: float) -> Ending:
        """Save the last version, unless it is saved or is version 0; return the ending, a failure if that failed.

        After a failure the rank may never answer: it gets `stop_s` to copy its weights.
        """
        try:
            return await self._finish(ending, version, stop_s)
        finally:
            remove_saved(self._settings.directory / EVALUATED)

    async def _finish(self, ending: Ending, version: int, stop_s: float) -> Ending:
        limit_s, last = self._settings.timeout_s, self._saved.get(LAST)
        if not version or (last is not None and last.version == version):
            self._keep_if_best(version)
            return ending
        self._finishing = True
        with anyio.CancelScope(shield=True):
            note = await self._attempt(self._hold, min(limit_s, stop_s) if ending.code == 1 else limit_s)
            if note is not None:
                note = await self._attempt(partial(self._save, note, [LAST]), limit_s)
        return ending if note is not None or ending.code == 1 else failure(self._errors[-1])

    def summary(self) -> dict[str, Any]:
        """Return what was saved, by folder, and how many saves failed."""
        folders = {
            name: {"version": note.version, "mean_reward": note.mean_reward}
            | ({} if note.evaluation is None else {"evaluation": note.evaluation})
            for name, note in self._saved.items()
            if name != EVALUATED
        }
        return {"folders": folders, "failed_saves": len(self._errors)}

    async def _hold(self) -> Note:
        """Have the rank copy its weights; return what is to be said of them."""
        version, settings = await self._holder.hold_weights(), self._settings
        return Note(
            version=version,
            step=version,
            mean_reward=Means.mean(self._progress.rewards.recent(settings.reward_window)),
            reward_window=settings.reward_window,
            config=settings.config,
            best_by=settings.best_by,
            evaluation=self._evaluation(version),
        )

    async def _write(self, note: Note, names: list[str], over: anyio.Event) -> None:
        try:
            await self._attempt(partial(self._save, note, names), self._settings.timeout_s)
        finally:
            over.set()

    async def _save(self, note: Note, names: list[str]) -> Note:
        names = [*names, BEST] if self._is_best(note) else names
        await self._holder.save_held([str(self._settings.directory / name) for name in names], note)
        self._saved.update(dict.fromkeys(names, note))
        log.info("the model is saved", version=note.version, mean_reward=note.mean_reward, folders=names)
        self._keep_if_best(note.version)
        return note

    def _keep_if_best(self, version: int) -> None:
        """Put a version in the place of the best, once it is saved, its scores are known, and they are better."""
        found = next((name for name in (EVALUATED, LAST) if self._saved_version(name) == version), None)
        figure, best = self._figures.get(version), self._figures.get(self._saved_version(BEST) or 0)
        if self._settings.best_by != "evaluation" or not version or found is None or figure is None:
            return
        if BEST in self._saved and (best is None or figure <= best):
            return
        source, target = (self._settings.directory / name for name in (found, BEST))
        try:
            written = replace(Note.read(source) or self._saved[found], evaluation=self._evaluation(version))
            copy_saved(source, target, written)
        except (AsyncRLError, OSError) as error:
            self._fail(error)
        else:
            self._saved[BEST] = written
            log.info("the best model so far", version=version, pass_at_1=figure[0], reward=figure[1])

    def _saved_version(self, name: str) -> int | None:
        note = self._saved.get(name)
        return None if note is None else note.version

    def _evaluation(self, version: int) -> dict[str, float] | None:
        figure = self._figures.get(version)
        return None if figure is None else {"pass_at_1": figure[0], "reward": figure[1]}

    def _is_best(self, note: Note) -> bool:
        if self._settings.best_by != "reward":
            return False
        best = self._saved.get(BEST)
        # The first batches say little of the weights: a best one is looked for once the window is full.
        if note.mean_reward is None or self._progress.batches < self._settings.reward_window:
            return False
        return best is None or best.mean_reward is None or note.mean_reward > best.mean_reward

    async def _attempt(self, call: Callable[[], Awaitable[Note]], limit_s: float) -> Note | None:
        """Await a part of a save; None, with a warning, if it fails: training goes on, and so does a run's end."""
        with anyio.move_on_after(limit_s) as limit:
            try:
                return await call()
            except (AsyncRLError, OSError, RuntimeError) as error:
                self._fail(error)
        if limit.cancelled_caught:
            self._fail(Overdue(f"the model was not saved within {limit_s:g} s (run.save_timeout_s)"))
        return None

    def _fail(self, error: Exception) -> None:
        self._errors.append(error)
        log.warning("the model could not be saved", error=str(error), failed_saves=len(self._errors))
