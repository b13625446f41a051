"""Several runs on one machine, and a run after another whose driver was killed."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kit import processes, settings
from kit.history import History
from kit.launch import Cold, Launcher, Process, Warm
from kit.tail import Tail

pytestmark = pytest.mark.chaos
SHARED_MEMORY = Path("/dev/shm")
EPOCHS = 1


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    launcher = Warm()
    yield launcher
    launcher.close()


def begin(launcher: Launcher, folder: Path, **more: str) -> Process:
    folder.mkdir(exist_ok=True)
    settings.prepare(folder)
    options = settings.options(settings.Limits(dead_s=30.0))
    options |= {"task.epochs": str(EPOCHS), "collector.count": "1", "trainer.ranks": "1", **more}
    return launcher.start(folder, settings.first_words(options))


def wait(until: Callable[[], bool], what: Callable[[], str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def history(folder: Path) -> History:
    return History.read(
        folder / settings.RUN, prompts=settings.PROMPTS, epochs=EPOCHS, max_staleness=settings.MAX_STALENESS
    )


def stores() -> set[Path]:
    return set(SHARED_MEMORY.glob("asyncrl-*"))


@pytest.mark.timeout(200)
def test_two_runs_at_once_do_not_meet(tmp_path: Path, warm: Warm) -> None:
    """Each has a Ray, a TransferQueue and a store of its own; each ledger is exact, and nothing of either stays."""
    before = stores()
    folders = [tmp_path / "one", tmp_path / "two"]
    # Slow enough that they overlap, whichever starts first.
    runs = [begin(warm, folder, **{"trainer.min_step_s": "1"}) for folder in folders]
    tails = [Tail(folder / settings.RUN / "events.jsonl") for folder in folders]
    together = False

    def ended() -> bool:
        nonlocal together
        together |= all(tail.read().steps and run.poll() is None for tail, run in zip(tails, runs, strict=True))
        return all(run.poll() is not None for run in runs)

    wait(ended, lambda: "".join(run.said() for run in runs), 180.0)
    assert [run.poll() for run in runs] == [0, 0], "".join(run.said() for run in runs)
    assert together
    for folder in folders:
        assert history(folder).faults == []
    assert stores() <= before


@pytest.mark.timeout(200)
def test_a_second_start_clears_away_what_a_killed_driver_left(tmp_path: Path) -> None:
    """FOUND-C12: also what was suspended when it was killed, and so hears of nothing."""
    before, cold = stores(), Cold()
    first = begin(cold, tmp_path / "one")
    tail = Tail(tmp_path / "one" / settings.RUN / "events.jsonl")
    wait(lambda: tail.read().steps >= 4, first.said)
    actors = [p for part in ("collector", "rank", "controller", "storage", "score") for p in find(part, first)]
    assert len(actors) >= 5
    everything = processes.tree(first.pid)
    for process in actors:
        process.suspend()
    os.kill(first.pid, signal.SIGKILL)
    second = cold.start(tmp_path / "one", settings.resume_words())
    try:
        wait(lambda: second.poll() is not None, second.said)
        assert second.poll() == 0, second.said()
        assert [process.cmdline()[:2] for process in everything if processes.lives(process)] == []
    finally:
        processes.kill_all(everything)
    assert stores() <= before
    assert history(tmp_path / "one").faults == []


def find(part: str, run: Process) -> list[psutil.Process]:
    return processes.of_part(part, run.pid)  # type: ignore[arg-type]
