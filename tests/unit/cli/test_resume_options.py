"""`train --resume`: what may not change is refused by a dry run too, and so is what would have no effect."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from asyncrl.configs import Override, load
from asyncrl.engine.events.types import RunStarted
from asyncrl.engine.trace.cutting import write_log

Command = Callable[..., Result]


@pytest.fixture
def resume(command: Command, folder: Path) -> Command:
    """Run `train --dry-run --resume` on a run of `reverse` that was stopped before its first checkpoint."""
    given = {"run.directory": "runs/old", "run.runtime": "local", "trainer.packed": False}
    config = load("reverse", [Override(path, value, "--set") for path, value in given.items()]).config.model_dump()
    (folder / "runs" / "old").mkdir(parents=True)
    write_log(folder / "runs" / "old" / "events.jsonl", [RunStarted(schema=2, config=config, software={}, seq=1)])
    return lambda *words: command("train", "--dry-run", "--resume", "runs/old", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "rollout.group_size=8"), "rollout.group_size: 16 -> 8"),
        (("--seed", "7", "--set", "trainer.learning_rate=0.5"), "run.seed: 0 -> 7; trainer.learning_rate: "),
        (("--config", "long_tail"), "task.name: 'reverse' -> 'long_tail'"),
        (("--config", "default"), "task.name: 'reverse' -> 'echo'"),
    ],
)
def test_a_dry_run_refuses_what_would_change_what_is_learned(
    resume: Command, words: tuple[str, ...], says: str
) -> None:
    result = resume(*words)
    assert result.exit_code == 2, result.output
    assert "the run cannot go on with another" in result.stderr
    assert says in result.stderr


def test_a_dry_run_says_what_would_differ(resume: Command) -> None:
    result = resume("--steps", "7")
    assert result.exit_code == 0, result.output
    assert result.stderr == "would go on with run.steps: None -> 7\n"
    assert resume().stderr == ""


def test_another_folder_for_a_run_that_goes_on_in_its_own_is_refused(resume: Command) -> None:
    for words, source in (
        (("--run-dir", "runs/new"), "--run-dir"),
        (("--set", "run.directory=runs/new"), "--set run.directory=runs/new"),
        (("--config", "reverse", "--run-dir", "runs/new"), "--run-dir"),
    ):
        result = resume(*words)
        assert result.exit_code == 2, result.output
        assert f"--resume runs/old: the run goes on in its own folder, and run.directory (from {source}) is" in (
            result.stderr
        )
        assert "'runs/new'" in result.stderr
    assert resume("--run-dir", "./runs/../runs/old").exit_code == 0


def test_a_run_that_was_moved_goes_on_where_it_is(resume: Command, command: Command, folder: Path) -> None:
    (folder / "runs" / "old").rename(folder / "moved")
    assert command("train", "--dry-run", "--resume", "moved").exit_code == 0
