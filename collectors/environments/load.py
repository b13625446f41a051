"""From the name in the configuration to an environment."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from asyncrl.collectors.environments.agents.agent import Agent
from asyncrl.collectors.environments.base import Environment
from asyncrl.collectors.environments.builtin.calculator import Calculator
from asyncrl.collectors.environments.builtin.guess import Guess
from asyncrl.collectors.environments.builtin.reasoning_gym import SecondChance
from asyncrl.collectors.environments.tools import Tool
from asyncrl.collectors.environments.verifiers.environment import Verifiers
from asyncrl.collectors.tasks.load import user_code
from asyncrl.configs.objects import load_object
from asyncrl.configs.parameters import check_parameters
from asyncrl.engine.errors import ConfigError

BUILT_IN: Mapping[str, type[Environment]] = {
    "agent": Agent,
    "calculator": Calculator,
    "guess": Guess,
    "reasoning_gym": SecondChance,
    "verifiers": Verifiers,
}


def load_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Build an environment; ConfigError if its name is unknown, it is not one, or its options or tools do not fit."""
    kind = _class(name)
    check_parameters(f"environment.options of {name}", kind, options, explained=" (docs/environments.md)")
    with user_code(f"environment.options {dict(options)} do not fit {name}"):
        environment: Environment = kind(**options)
    if environment.extras:
        raise ConfigError(f"environment.name {name}: an environment cannot attach extras, and has {environment.extras}")
    _check_tools(environment, name)
    return environment


def _class(name: str) -> type[Environment]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        found: Any = load_object(name, option="environment.name")
    else:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"environment.name is {name!r}{hint}; it must be one of {', '.join(BUILT_IN)}, or module:Class of your own"
        )
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(f"environment.name {name} is a {type(found).__name__}, not a subclass of Environment")
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, method)):
            raise ConfigError(f"environment.name {name}: {method} must be async (async def {method})")
    if found.step is Environment.step:
        raise ConfigError(f"environment.name {name} has no step, which says what a turn leads to")
    return found


def _check_tools(environment: Environment, name: str) -> None:
    names: set[str] = set()
    for tool in environment.tools:
        if not isinstance(tool, Tool):
            raise ConfigError(f"environment.name {name}: tools has {tool!r}; each must be a Tool")
        if tool.name in names:
            raise ConfigError(f"environment.name {name}: two tools are called {tool.name!r}")
        if not inspect.iscoroutinefunction(tool.call):
            raise ConfigError(f"environment.name {name}: the call of tool {tool.name!r} must be async")
        if tool.parameters.get("type") != "object":
            raise ConfigError(
                f"environment.name {name}: the parameters of tool {tool.name!r} are of type "
                f"{tool.parameters.get('type')!r}; they must be a JSON schema of type object"
            )
        names.add(tool.name)
