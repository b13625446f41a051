"""When a run saves its model, and what a save that fails or takes long costs."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.errors import ActorDied, NotWritten, Overdue
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.events.types import BatchJudged
from asyncrl.engine.loop.model_saver import ModelSaver, SaverSettings
from asyncrl.engine.model.folder import BEST, Note
from asyncrl.engine.records.ending import Ending, failure

DONE = Ending(0, "batch limit reached")
NO_SPACE = NotWritten("model could not be written: No space left on device")


@pytest.mark.parametrize(("version", "best"), [(4, {"version": 4, "mean_reward": 0.9}), (3, None)])
def test_the_best_model_of_a_resumed_run_is_that_of_its_checkpoint_or_before(
    version: int, best: dict[str, float] | None, tmp_path: Path
) -> None:
    (tmp_path / BEST).mkdir()
    Note(version=4, step=4, mean_reward=0.9, reward_window=2, config="0").write(tmp_path / BEST)
    settings = SaverSettings(tmp_path, every=1, best=True, reward_window=2, timeout_s=1.0, config="0")
    saver = ModelSaver(settings, Holder(), Progress(2))
    saver.resumed(version)
    assert saver.summary()["folders"].get(BEST) == best


class Holder:
    """A rank at `version`, whose save takes `seconds`; the saves numbered in `failing` find the disk full."""

    def __init__(self, *, seconds: float = 0.0, failing: Sequence[int] = ()) -> None:
        self.version = 0
        self.saved: list[tuple[int, list[str]]] = []
        self.under_way = self.most = self.tries = 0
        self._seconds = seconds
        self._failing = failing

    async def hold_weights(self) -> int:
        return self.version

    async def save_held(self, folders: Sequence[str], note: Note) -> None:
        self.tries += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.tries in self._failing:
                raise NO_SPACE
            await anyio.sleep(self._seconds)
            self.saved.append((note.version, [Path(folder).name for folder in folders]))
        finally:
            self.under_way -= 1


class Play:
    """A run of steps, one every second, each with the mean reward of its batch; then its end."""

    def __init__(self, holder: Holder, *, window: int = 2, timeout_s: float = 100.0, every: int | None = 2) -> None:
        self.holder = holder
        self._progress = Progress(window)
        settings = SaverSettings(
            Path("out"), every=every, best=every is not None, reward_window=window, timeout_s=timeout_s, config="0"
        )
        self.saver = ModelSaver(settings, holder, self._progress)
        self.seconds = 0.0

    def run(self, rewards: Sequence[float], ending: Ending = DONE) -> Ending:
        return run_virtual(lambda: self._steps(rewards, ending))

    async def _steps(self, rewards: Sequence[float], ending: Ending) -> Ending:
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for version, reward in enumerate(rewards, start=1):
                await anyio.sleep(1.0)
                self._progress.apply(
                    BatchJudged(batch=version, judged=1, kept=1, attempts=1, reward_sum=reward, reward_count=1)
                )
                self.holder.version = version
                await self.saver.after_step(version, tasks)
            self.seconds = anyio.current_time() - began
            tasks.cancel_scope.cancel()
        return await self.saver.finish(ending, version=self.holder.version, stop_s=5.0)


def test_every_n_steps_and_at_the_end_and_the_best_apart() -> None:
    play = Play(Holder(), window=3)
    assert play.run([0.9, 0.9, 0.1, 0.5, 0.5, 0.8, 0.2]) == DONE
    both = ["model", "model-best"]
    # Version 2 is not among the best: the window is not full.
    assert play.holder.saved == [(2, ["model"]), (4, both), (6, both), (7, ["model"])]
    assert play.saver.summary()["folders"]["model-best"]["version"] == 6


def test_without_an_interval_only_the_last_version_is_saved_and_none_of_a_run_without_a_step() -> None:
    play = Play(Holder(), every=None)
    play.run([0.5] * 5)
    assert play.holder.saved == [(5, ["model"])]
    play = Play(Holder(), every=None)
    play.run([])
    assert play.holder.saved == []


def test_a_step_waits_for_a_save_only_where_the_next_one_is_due() -> None:
    """A save takes 5 s: those at 2, 4 and 6 steps are made one after the other, and the one at the end too."""
    play = Play(Holder(seconds=5.0))
    play.run([0.5] * 3)
    assert play.seconds == pytest.approx(3.0)
    play = Play(Holder(seconds=5.0))
    play.run([0.5] * 7)
    assert play.holder.most == 1
    assert play.seconds == pytest.approx(2.0 + 5.0 + 5.0 + 1.0)


def test_a_full_disk_is_counted_while_a_run_trains_and_fails_one_that_ends() -> None:
    play = Play(Holder(failing=[1, 2]))
    assert play.run([0.5] * 7) == DONE
    assert [version for version, _ in play.holder.saved] == [6, 7]
    assert play.saver.summary()["failed_saves"] == 2
    play = Play(Holder(failing=[1, 2]), every=None)
    assert play.run([0.5] * 3) == failure(NO_SPACE)
    assert play.saver.summary() == {"folders": {}, "failed_saves": 1}


def test_a_run_that_failed_keeps_its_cause_and_saves_what_it_has() -> None:
    broken = failure(ActorDied("collector0 died", actor="collector0"))
    play = Play(Holder(), every=None)
    assert play.run([0.5] * 3, broken) == broken
    assert play.holder.saved == [(3, ["model"])]
    play = Play(Holder(failing=[1]), every=None)
    assert play.run([0.5] * 3, broken) == broken


def test_a_save_that_hangs_is_given_up() -> None:
    play = Play(Holder(seconds=1e9), every=None, timeout_s=50.0)
    ending = play.run([0.5])
    assert ending.code == 1
    assert isinstance(ending.error, Overdue)
    assert "not saved within 50 s" in ending.reason
