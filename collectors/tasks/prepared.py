"""A run's task before anything starts: built once, with its prompts and examples requested once."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.environments.base import Environment
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.environments.tools import Tools
from asyncrl.collectors.rewards.function import RewardFunction
from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.load import load_task
from asyncrl.collectors.tasks.prompts import list_examples, list_prompts
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt, PromptStream


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """`examples` are (prompt, answer) pairs; empty without an SFT warm-up.

    `prompts` are those of one epoch. With a `stream` from data sets, they are the longest ones of the records that were
    looked at, by which a run is checked. `rewards` score in place of the task. `warnings` are told at its start.
    `evaluation` has the prompts of evaluations, if there are any.
    """

    task: Task
    prompts: Sequence[Prompt]
    examples: Sequence[tuple[str, str]]
    stream: PromptStream | None = None
    rewards: Sequence[RewardFunction] = ()
    warnings: Sequence[str] = ()
    evaluation: Sequence[Prompt] = ()

    @property
    def source(self) -> Sequence[Prompt] | PromptStream:
        """What the run's prompts come from."""
        return self.prompts if self.stream is None else self.stream

    @property
    def prompt_count(self) -> int:
        """How many prompts an epoch has."""
        return len(self.prompts) if self.stream is None else self.stream.prompts

    @property
    def tools(self) -> Tools:
        """What the model may call; only an environment has tools."""
        return self.task.tools if isinstance(self.task, Environment) else ()

    @property
    def blocks(self) -> bool:
        """Whether any of what scores is not async."""
        if isinstance(self.task, Environment):
            return False
        if self.rewards:
            return not all(reward.kind.asynchronous for reward in self.rewards)
        return not inspect.iscoroutinefunction(self.task.score)


def prepare_task(
    name: str,
    options: Mapping[str, Any],
    *,
    warm_up: bool,
    lists: bool = True,
    rewards: Sequence[RewardFunction] = (),
) -> PreparedTask:
    """Run what a task has to say before a run starts, and check it: ConfigError if it cannot work.

    It runs once per process, before Ray and our signal handlers: they would reach the children of a `prompts()`
    that uses a process pool. Without `lists` it is asked for no prompts: they come from data sets.
    """
    task = load_task(name, options)
    _check_scored_once(task, name, rewards)
    if not lists:
        return PreparedTask(task, (), ())
    prompts = list_prompts(task, name)
    return PreparedTask(task, prompts, list_examples(task, name) if warm_up else (), rewards=rewards)


def prepare_environment(name: str, options: Mapping[str, Any], *, warm_up: bool, lists: bool = True) -> PreparedTask:
    """Build an environment as `prepare_task` builds a task: ConfigError if it cannot work."""
    environment, option = load_environment(name, options), "environment.name"
    if not lists:
        return PreparedTask(environment, (), ())
    prompts = list_prompts(environment, name, option=option)
    return PreparedTask(environment, prompts, list_examples(environment, name, option=option) if warm_up else ())


def _check_scored_once(task: Task, name: str, rewards: Sequence[RewardFunction]) -> None:
    """Refuse a task that nothing scores, and one whose own score would have no effect beside reward functions."""
    scores = type(task).score is not Task.score
    if scores and rewards:
        raise ConfigError(
            f"task.name {name} scores its responses itself, and reward.functions has {rewards[0].name}; one of them "
            "would have no effect. Leave the reward out, or give prompts with --data FILE"
        )
    if not scores and not rewards:
        raise ConfigError(
            f"task.name {name} has no score, and reward.functions is empty: nothing rewards its responses. Name one, "
            "as in --reward exact_match or --reward my_reward.py:score"
        )
