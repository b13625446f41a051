"""The run that is broken: the smallest that has every part, with limits that a test can wait for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. A part that has not answered for `dead_s` is dead, which the run is configured to find.

    A run that fails has ended `clean_s` after that. A run that has neither failed nor taken two steps with all its
    parts `recovered_s` after a fault hangs. One that starts takes its first step within `start_s`.
    """

    dead_s: float = 5.0
    clean_s: float = 10.0
    recovered_s: float = 60.0
    start_s: float = 90.0
    stop_s: float = 3.0


PROMPTS = 24
MAX_STALENESS = 2
RUN = "run"

_TASK = f"""
from asyncrl.collectors.tasks import Task
from asyncrl.engine.records import Prompt


class Sums(Task):
    def prompts(self):
        return [Prompt(i, f"{{i}}>") for i in range({PROMPTS})]

    def score(self, prompt, response):
        return (sum(map(ord, response)) + prompt.id) % 7 / 7
"""

_OPTIONS = {
    "run.batches": "null",
    "run.save_model": "false",
    "task.name": "sums.py:Sums",
    "task.retire_after": "1000000",
    "rollout.max_staleness": str(MAX_STALENESS),
    "rollout.groups_per_step": "2",
    "rollout.group_size": "4",
    "filters": "[]",
    "collector.count": "2",
    "collector.max_failures_in_a_row": "1000",
    "trainer.ranks": "2",
    "trainer.min_step_s": "0.25",
    "checkpoint.every_steps": "3",
}


def prepare(folder: Path) -> None:
    """Write the task of the run into its folder."""
    (folder / "sums.py").write_text(_TASK, encoding="utf-8")


def options(limits: Limits) -> dict[str, str]:
    """Return the run's configuration, with the limits by which it finds what is dead."""
    seconds = {
        "collector.group_timeout_s": 2 * limits.dead_s,
        "collector.score_timeout_s": limits.dead_s,
        "collector.put_timeout_s": limits.dead_s,
        # What a step and a publish wait for has a limit of its own, which names it.
        "trainer.step_timeout_s": 2 * limits.dead_s,
        "trainer.publish_timeout_s": 2 * limits.dead_s,
        "data_plane.deadline_s": limits.dead_s,
        "supervision.answer_timeout_s": limits.dead_s,
        "supervision.start_timeout_s": limits.start_s,
        "supervision.starve_timeout_s": 2 * limits.dead_s,
        "supervision.stop_timeout_s": limits.stop_s,
    }
    return {**_OPTIONS, **{key: f"{value:g}" for key, value in seconds.items()}}


def first_words(given: Mapping[str, str]) -> list[str]:
    """Return the words of the command that begins the run."""
    return ["train", "--run-dir", RUN, *(f"--set={key}={value}" for key, value in given.items())]


def resume_words(*more: str) -> list[str]:
    """Return the words of the command by which it goes on."""
    return ["train", "--resume", RUN, *more]
