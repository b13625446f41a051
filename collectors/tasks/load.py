"""From the name in the configuration to a task."""

import difflib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.digits import Echo, Reverse
from asyncrl.collectors.tasks.long_tail import LongTail
from asyncrl.collectors.tasks.reasoning_gym import ReasoningGym
from asyncrl.collectors.tasks.sleepy import Sleepy
from asyncrl.configs.objects import load_object
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records.columns import check_extra

BUILT_IN: Mapping[str, type[Task]] = {
    "echo": Echo,
    "reverse": Reverse,
    "sleepy": Sleepy,
    "long_tail": LongTail,
    "reasoning_gym": ReasoningGym,
}


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task; ConfigError if the name is unknown, the class is not a Task, or the options do not fit."""
    kind = task_class(name)
    with user_code(f"task.options {dict(options)} do not fit {name}"):
        task: Task = kind(**options)
    _check_extras(task, name)
    return task


def task_class(name: str) -> type[Task]:
    """Return a task's class; ConfigError if the name is unknown, or the class is not a Task."""
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
    return found


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn anything that user code raises, also `sys.exit()`, into a ConfigError that begins with `what`."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error
    except BaseException as error:  # The edge of user code.
        raise ConfigError(f"{what}: it raised {error!r}") from error


def _check_extras(task: Task, name: str) -> None:
    if isinstance(task.extras, str) or len(set(task.extras)) != len(task.extras):
        raise ConfigError(f"task.name {name}: extras are {task.extras!r}; they must be a list of names, each once")
    for extra in task.extras:
        try:
            check_extra(extra)
        except ValueError as error:
            raise ConfigError(f"task.name {name}: {error}") from error
