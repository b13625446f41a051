"""When a checkpoint is made, what it waits for, and what one that fails costs."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.blocking import in_place, in_thread
from asyncrl.engine.aio.virtual_time import run_virtual
from asyncrl.engine.checkpoint import folder as on_disk
from asyncrl.engine.checkpoint.state import CoreState, FrontEndState, PromptsState, RetirementState, RunState
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.deployment import CONSUMER, PARTITION, Deployment
from asyncrl.engine.errors import NotWritten
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import Checkpointed
from asyncrl.engine.loop.checkpointer import Checkpointer, CheckpointSettings
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.settlement import Settlement
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.testing.fakes import fake_group

DONE = Ending(0, "step limit reached")


@dataclass
class Rank:
    """A rank at `version`, whose files take `seconds`; the saves numbered in `failing` find the disk full."""

    seconds: float = 0.0
    failing: Sequence[int] = ()
    version: int = 0
    saves: int = 0
    held: list[int] = field(default_factory=list)

    async def hold_state(self) -> int:
        self.held.append(self.version)
        return self.version

    async def save_state(self, folder: str) -> None:
        self.saves += 1
        await anyio.sleep(self.seconds)
        if self.saves in self.failing:
            raise NotWritten("No space left on device")
        Path(folder, "rank.txt").write_text(str(self.held[-1]))

    async def load_state(self, folder: str) -> None: ...


class Play:
    """A run of steps, one every second, with one group that is claimed and has no fate."""

    def __init__(self, directory: Path, rank: Rank, **settings: Any) -> None:
        self.rank = rank
        self.seconds = 0.0
        self.log = EventLog(
            clock=lambda: self.seconds, wall=lambda: self.seconds, path=directory / "events.jsonl", folds=[self]
        )
        self.plane = LocalPlane()
        given = {"every_steps": None, "every_s": None, "at_end": False, "keep": 9, "timeout_s": 100.0, **settings}
        deployment = Deployment(self.plane, (), (), (), (), states=[rank])
        settings_ = CheckpointSettings(directory / "checkpoints", run="{}", **given)
        self.checkpoints = Checkpointer(settings_, deployment, events=self.log, blocking=in_place)
        self.groups = Groups(
            plane=self.plane, partition=PARTITION, consumer=CONSUMER, log=self.log, run_ahead=RunAhead(9)
        )
        self.marked: list[tuple[int, float]] = []
        self.directory = directory

    def apply(self, event: Any) -> None:
        if isinstance(event, Checkpointed):
            self.marked.append((event.version, event.t))

    async def register(self) -> None:
        await self.plane.register(Partition(PARTITION, 2, (), (CONSUMER,)))

    async def claim_a_group(self) -> Settlement:
        """Have a group claimed; return how it will settle."""
        group = fake_group(0, [0.0, 1.0])
        self.groups.dispatch(Grant(0, Prompt(0, "0>"), 2, 0), "collector0", served=0)
        await self.plane.put(PARTITION, group, {})
        self.groups.claim(
            await self.plane.claim(PARTITION, CONSUMER, columns=(), max_groups=1, owner="driver", claim_id="driver/0")
        )
        return Settlement(group, ("dropped:stale",) * 2)

    def state(self) -> RunState:
        core = CoreState(self.rank.version, self.groups.state(range(9)), [], {}, FrontEndState(0, None, []), {}, {}, {})
        return RunState(core, PromptsState(1, {}, []), RetirementState([], [], ""), 1, {})

    def run(self, steps: int, *, ending: Ending = DONE) -> list[str]:
        """Take steps; return the whole checkpoints that are there afterwards."""

        async def main() -> None:
            await self.register()
            async with anyio.create_task_group() as tasks:
                for _ in range(steps):
                    await anyio.sleep(1.0)
                    self.seconds += 1.0
                    self.rank.version += 1
                    await self.checkpoints.after_step(self.rank.version, self.state, self.groups, tasks)
            await self.checkpoints.finish(ending, self.state, self.groups, version=self.rank.version)

        run_virtual(main)
        self.log.close()
        found = on_disk.newest_first(self.directory / "checkpoints")
        for folder in found:
            on_disk.check(folder)
        return [folder.name for folder in reversed(found)]


def test_by_steps_by_seconds_and_at_the_end(tmp_path: Path) -> None:
    for name, settings, made in (
        ("steps", {"every_steps": 3}, [3, 6]),
        ("seconds", {"every_s": 4.0}, [4, 8]),
        ("both", {"every_steps": 5, "every_s": 4.0}, [4, 8]),
        ("end", {"at_end": True}, [8]),
        ("never", {}, []),
    ):
        (tmp_path / name).mkdir()
        play = Play(tmp_path / name, Rank(), **settings)
        assert play.run(8) == [on_disk.name_of(version) for version in made]
        assert play.marked == [(version, float(version)) for version in made]


@pytest.mark.parametrize("ending", [Ending(1, "no"), DONE])
def test_a_run_that_failed_keeps_the_checkpoint_that_it_had(ending: Ending, tmp_path: Path) -> None:
    play = Play(tmp_path, Rank(), every_steps=2, at_end=True)
    assert play.run(3, ending=ending) == ["v000002", "v000003"][: 1 if ending.code else 2]


def test_while_one_is_written_none_is_made_and_training_does_not_wait(tmp_path: Path) -> None:
    """Each takes 2.5 s to write, and one is due at each step: every third makes one."""
    play = Play(tmp_path, Rank(seconds=2.5), every_steps=1)
    assert play.run(7) == ["v000001", "v000004", "v000007"]
    assert play.marked == [(1, 1.0), (4, 4.0), (7, 7.0)]


def test_a_full_disk_costs_one_checkpoint_and_ends_nothing(tmp_path: Path) -> None:
    play = Play(tmp_path, Rank(failing=[2]), every_steps=2)
    assert play.run(6) == ["v000002", "v000006"]
    assert play.checkpoints.summary() == {"made": 2, "failed": 1}
    assert not list((tmp_path / "checkpoints").glob("*.broken"))


def test_a_disk_that_hangs_costs_one_checkpoint(tmp_path: Path) -> None:
    rank = Rank(seconds=50.0)
    play = Play(tmp_path, rank, every_steps=2, timeout_s=1.5)
    assert play.run(3) == []
    assert play.checkpoints.summary() == {"made": 0, "failed": 1}


def test_the_rows_of_the_cut_stay_until_they_are_copied(tmp_path: Path) -> None:
    """A group that settles right after the cut is in the checkpoint all the same, and its keys go after that."""
    play = Play(tmp_path, Rank(), every_steps=1)
    seen: list[int] = []

    async def main() -> None:
        await play.register()
        settlement = await play.claim_a_group()
        over = play.groups.copying(play.groups.state(range(9)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play.groups.settle, [settlement])
            await anyio.sleep(1.0)
            seen.append(len(await play.plane.keys(PARTITION)))
            over()
            await anyio.sleep(1.0)
            seen.append(len(await play.plane.keys(PARTITION)))

    run_virtual(main)
    assert seen == [2, 0]


def test_a_rank_at_another_version_makes_no_checkpoint(tmp_path: Path) -> None:
    play = Play(tmp_path, Rank(), every_steps=1)
    state: Callable[[], RunState] = play.state
    play.rank.version = 4

    async def main() -> None:
        await play.register()
        async with anyio.create_task_group() as tasks:
            told = state()
            play.rank.version = 5
            await play.checkpoints.after_step(4, lambda: told, play.groups, tasks)

    run_virtual(main)
    assert play.checkpoints.summary() == {"made": 0, "failed": 1}


def test_one_that_is_given_up_while_its_files_are_hashed_leaves_the_next_of_its_version_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread goes on when nobody waits for it any more: it would rename a folder whose files were removed."""
    play = Play(tmp_path, Rank(), at_end=True, every_steps=1)
    play.checkpoints._blocking = in_thread
    begun, finish = threading.Event(), on_disk.finish

    def slowly(*arguments: Any, **named: Any) -> None:
        first = not begun.is_set()
        begun.set()
        if first:
            time.sleep(0.3)
        finish(*arguments, **named)

    monkeypatch.setattr(on_disk, "finish", slowly)

    async def main() -> None:
        await play.register()
        play.rank.version = 1
        async with anyio.create_task_group() as tasks:
            await play.checkpoints.after_step(1, play.state, play.groups, tasks)
            await anyio.to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()
        await play.checkpoints.finish(DONE, play.state, play.groups, version=1)

    anyio.run(main)
    play.log.close()
    (found,) = on_disk.newest_first(tmp_path / "checkpoints")
    assert set(on_disk.check(found).files) >= {"trainer/rank.txt", on_disk.STATE, on_disk.RUN}
    assert play.checkpoints.summary()["failed"] == 0
