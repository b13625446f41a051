"""A run's task before anything starts: built once, with its prompts and examples requested once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.load import load_task
from asyncrl.collectors.tasks.prompts import list_examples, list_prompts
from asyncrl.engine.records import Prompt, PromptStream


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """`examples` are (prompt, answer) pairs; empty without an SFT warm-up.

    `prompts` are those of one epoch. With a `stream` from data sets, they are the longest ones of the records that were
    looked at, by which a run is checked.
    """

    task: Task
    prompts: Sequence[Prompt]
    examples: Sequence[tuple[str, str]]
    stream: PromptStream | None = None

    @property
    def source(self) -> Sequence[Prompt] | PromptStream:
        """What the run's prompts come from."""
        return self.prompts if self.stream is None else self.stream


def prepare_task(name: str, options: Mapping[str, Any], *, warm_up: bool, lists: bool = True) -> PreparedTask:
    """Run what a task has to say before a run starts, and check it: ConfigError if it cannot work.

    It runs once per process, before Ray and our signal handlers: they would reach the children of a `prompts()`
    that uses a process pool. Without `lists` it is asked for no prompts: they come from data sets.
    """
    task = load_task(name, options)
    if not lists:
        return PreparedTask(task, (), ())
    prompts = list_prompts(task, name)
    return PreparedTask(task, prompts, list_examples(task, name) if warm_up else ())
