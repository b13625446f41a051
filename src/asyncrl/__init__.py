"""Asynchronous reinforcement learning for language models, with bounded staleness.

What users import is here, and is loaded when it is first asked for:

    import asyncrl

    summary = asyncrl.run("default", "runs/first", {"run.runtime": "local"})

`run` trains, `generate` answers from what a run has learned and `evaluate` says how good it is. `load_config` reads a
configuration, `replay` checks a run's decisions, `plan_batch` is the planner alone. `BaseRolloutFilter` with `keep`,
`drop`, `mask` and `rescue`, and `Task` with `Prompt` and `Reward`, are what users subclass and return.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.collectors.tasks.base import Reward, Task
    from asyncrl.configs.load import load_config
    from asyncrl.engine.errors import AsyncRLError, ConfigError
    from asyncrl.engine.evaluate import Evaluation, evaluate
    from asyncrl.engine.generate import generate
    from asyncrl.engine.records.prompt import Prompt
    from asyncrl.engine.run import run
    from asyncrl.engine.running.outcome import RunFailed, RunInterrupted, Summary
    from asyncrl.engine.running.replay_log import replay
    from asyncrl.filters.base import BaseRolloutFilter
    from asyncrl.filters.verdict import drop, keep, mask, rescue
    from asyncrl.trainers.fan_out import plan_batch

__version__ = "0.1.0"

_HOMES = {
    "AsyncRLError": "engine.errors",
    "BaseRolloutFilter": "filters.base",
    "ConfigError": "engine.errors",
    "Evaluation": "engine.evaluate",
    "Prompt": "engine.records.prompt",
    "Reward": "collectors.tasks.base",
    "RunFailed": "engine.running.outcome",
    "RunInterrupted": "engine.running.outcome",
    "Summary": "engine.running.outcome",
    "Task": "collectors.tasks.base",
    "drop": "filters.verdict",
    "evaluate": "engine.evaluate",
    "generate": "engine.generate",
    "keep": "filters.verdict",
    "load_config": "configs.load",
    "mask": "filters.verdict",
    "plan_batch": "trainers.fan_out",
    "replay": "engine.running.replay_log",
    "rescue": "filters.verdict",
    "run": "engine.run",
}

__all__ = [
    "AsyncRLError",
    "BaseRolloutFilter",
    "ConfigError",
    "Evaluation",
    "Prompt",
    "Reward",
    "RunFailed",
    "RunInterrupted",
    "Summary",
    "Task",
    "__version__",
    "drop",
    "evaluate",
    "generate",
    "keep",
    "load_config",
    "mask",
    "plan_batch",
    "replay",
    "rescue",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"asyncrl.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
