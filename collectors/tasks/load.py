"""From the name in the configuration to a task."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.digits import Echo, Reverse
from asyncrl.collectors.tasks.sleepy import Sleepy
from asyncrl.configs.objects import load_object
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records.columns import check_extra

BUILT_IN: Mapping[str, type[Task]] = {"echo": Echo, "reverse": Reverse, "sleepy": Sleepy}


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task; ConfigError for an unknown name, a class that is no Task, or bad options."""
    if name in BUILT_IN:
        found: Any = BUILT_IN[name]
    elif ":" in name:
        found = load_object(name, option="task.name")
    else:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"task.name is {name!r}{hint}; it must be one of {', '.join(BUILT_IN)}, or module:Class of your own"
        )
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ConfigError(f"task.name {name} is {found!r}, not a subclass of Task")
    try:
        task: Task = found(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.options {dict(options)} do not fit {name}: {error}") from error
    _check_extras(task, name)
    prompts = task.prompts()
    if not prompts:
        raise ConfigError(f"task.name {name}: the task has no prompts")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ConfigError(f"task.name {name}: prompt ids repeat; they must be unique")
    empty = [prompt.id for prompt in prompts if not prompt.text]
    if empty:
        raise ConfigError(f"task.name {name}: prompt {empty[0]} has no text; generation needs at least one token")
    return task


def _check_extras(task: Task, name: str) -> None:
    if isinstance(task.extras, str) or len(set(task.extras)) != len(task.extras):
        raise ConfigError(f"task.name {name}: extras are {task.extras!r}; they must be a list of names, each once")
    for extra in task.extras:
        try:
            check_extra(extra)
        except ValueError as error:
            raise ConfigError(f"task.name {name}: {error}") from error
