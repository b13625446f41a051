"""Scoring in processes: what hangs or dies is replaced, fails its own sample, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import psutil
import pytest

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure
from asyncrl.collectors.score_process import ProcessScorer
from asyncrl.collectors.tasks import Reward, load_task
from asyncrl.engine.records import Prompt

# No other test run on this machine starts one for so long.
SLEEP = ["sleep", f"6543.{os.getpid()}"]

TASK = f"""
import os, re, subprocess, sys, time
from asyncrl.collectors.tasks import Reward, Task

class Runs(Task):
    def __init__(self, built=True):
        if not built:
            sys.exit("not today")
    def prompts(self):
        return []
    def score(self, prompt, response):
        if response == "backtracks":
            re.fullmatch(r"(a+)+", "a" * 60 + "b")
        if response == "leaves a child":
            subprocess.Popen({SLEEP})
            re.fullmatch(r"(a+)+", "a" * 60 + "b")
        exec(response)
        return Reward(1.0, dict(pid=os.getpid(), torch="torch" in sys.modules))
"""

Make = Callable[..., ProcessScorer]


def _command(process: psutil.Process) -> str:
    """Return how a process was called; nothing of one that has ended by now."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_runs.py").write_text(TASK, encoding="utf-8")
    made: list[ProcessScorer] = []

    def scorer(timeout_s: float = 20.0, **options: object) -> ProcessScorer:
        rules = Rules("user_runs:Runs", timeout_s=timeout_s)
        build = partial(load_task, "user_runs:Runs", options)
        made.append(ProcessScorer(build, rules, processes=1, start_timeout_s=20.0))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield scorer
    for one in made:
        one.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "score_worker" in _command(p)]


@pytest.fixture(scope="module")
def scorer(make: Make) -> ProcessScorer:
    return make(timeout_s=1.0)


def scored(scorer: ProcessScorer, *responses: str) -> list[Outcome]:
    return anyio.run(scorer.score, Prompt(0, "0>"), responses)


def causes(outcomes: Sequence[Outcome]) -> list[str | None]:
    return [outcome.cause if isinstance(outcome, SampleFailure) else None for outcome in outcomes]


def pid(outcome: Outcome) -> int:
    assert isinstance(outcome, Reward)
    return int(outcome.parts["pid"])


def test_a_process_scores_all_and_imports_no_torch(scorer: ProcessScorer) -> None:
    """FOUND-C20: another process than this one, the same for all, which starts fast."""
    outcomes = scored(scorer, "a = 1", "a = 2", "raise ValueError('a')", "exit()")
    assert causes(outcomes) == [None, None, "score_error", "score_error"]
    assert pid(outcomes[0]) == pid(outcomes[1]) != os.getpid()
    assert isinstance(outcomes[0], Reward)
    assert outcomes[0].parts["torch"] == 0.0
    assert "user_runs:Runs: score raised SystemExit" in outcomes[3].error  # type: ignore[union-attr]


def test_a_cancelled_group_leaves_its_process_to_the_next(scorer: ProcessScorer) -> None:
    """The response under way is finished, in its thread; no new process is needed, and the loop does not wait.

    The 49 others, of 0.6 s each, are left out.
    """

    async def main() -> tuple[float, float, list[Outcome], list[Outcome]]:
        before = await scorer.score(Prompt(0, "0>"), ["a = 1"])
        started = time.monotonic()
        with anyio.move_on_after(0.05):
            await scorer.score(Prompt(0, "0>"), ["time.sleep(0.6)"] * 50)
        waited = time.monotonic() - started
        after = await scorer.score(Prompt(0, "0>"), ["a = 1"])
        return waited, time.monotonic() - started, before, after

    waited, next_s, before, after = anyio.run(main)
    assert waited < 0.5
    assert next_s < 15.0
    assert pid(before[0]) == pid(after[0])


def test_what_hangs_or_ends_its_process_fails_alone_and_the_loop_goes_on(scorer: ProcessScorer) -> None:
    """FOUND-C20: a regular expression that backtracks for ever holds the interpreter; os._exit takes it away."""
    outcomes: list[Outcome] = []

    async def main() -> float:
        longest = 0.0

        async def score() -> None:
            outcomes.extend(await scorer.score(Prompt(0, "0>"), ["leaves a child", "a = 1", "os._exit(3)", "a = 2"]))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(score)
            while True:
                asked = time.monotonic()
                await anyio.sleep(0.01)
                longest = max(longest, time.monotonic() - asked)
        return longest

    assert anyio.run(main) < 0.5
    assert causes(outcomes) == ["score_timeout", None, "score_error", None]
    assert "user_runs:Runs: the process that scores ended while it scored, with exit code 3" in outcomes[2].error  # type: ignore[union-attr]
    assert pid(outcomes[1]) != pid(outcomes[3])
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == SLEEP]


def test_a_task_that_cannot_be_built_there_says_so_for_all(make: Make) -> None:
    outcomes = scored(make(built=False), "a = 1", "a = 2")
    assert isinstance(outcomes[0], SampleFailure)
    assert "not today" in outcomes[0].error
    assert outcomes[0] is outcomes[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a process with its parent")
def test_a_process_that_scores_ends_with_the_collectors_process(tmp_path: Path) -> None:
    """FOUND-C20: also while it hangs, and whatever killed the collector."""
    (tmp_path / "user_runs.py").write_text(TASK, encoding="utf-8")
    code = (
        "import sys, anyio; sys.path.append(sys.argv[1])\n"
        "from asyncrl.collectors.outcome import Rules\n"
        "from asyncrl.collectors.score_process import ProcessScorer\n"
        "from asyncrl.engine.records import Prompt\n"
        "from functools import partial\n"
        "from asyncrl.collectors.tasks import load_task\n"
        "build = partial(load_task, 'user_runs:Runs', {})\n"
        "s = ProcessScorer(build, Rules('user_runs:Runs'), processes=1, start_timeout_s=20)\n"
        "print(int(anyio.run(s.score, Prompt(0, '0>'), ['a = 1'])[0].parts['pid']), flush=True)\n"
        "anyio.run(s.score, Prompt(0, '0>'), ['backtracks'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.1)
        assert child.is_running()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        child.wait(timeout=2)
