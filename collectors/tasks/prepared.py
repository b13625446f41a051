"""A run's task before anything starts: built once, with its prompts and examples requested once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.load import load_task
from asyncrl.collectors.tasks.prompts import list_examples, list_prompts
from asyncrl.engine.records import Prompt


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """`examples` are (prompt, answer) pairs; empty without an SFT warm-up."""

    task: Task
    prompts: Sequence[Prompt]
    examples: Sequence[tuple[str, str]]


def prepare_task(name: str, options: Mapping[str, Any], *, warm_up: bool) -> PreparedTask:
    """Run what a task has to say before a run starts, and check it: ConfigError if it cannot work.

    It runs once per process, before Ray and our signal handlers: they would reach the children of a `prompts()`
    that uses a process pool.
    """
    task = load_task(name, options)
    prompts = list_prompts(task, name)
    return PreparedTask(task, prompts, list_examples(task, name) if warm_up else ())
