"""From configuration to reward functions: built-in names, `module:function`, or `file.py:function`."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.collectors.rewards.builtin.code import Code
from asyncrl.collectors.rewards.builtin.exact_match import ExactMatch
from asyncrl.collectors.rewards.builtin.format import Format
from asyncrl.collectors.rewards.builtin.length import Length
from asyncrl.collectors.rewards.builtin.math_verify import MathVerify
from asyncrl.collectors.rewards.builtin.regex import Regex
from asyncrl.collectors.rewards.function import ALONE, OF_GROUP, REWARDS, Kind, RewardFunction
from asyncrl.collectors.rewards.total import RewardSum, reward_sum
from asyncrl.collectors.tasks.base import CORE_TAGS
from asyncrl.collectors.tasks.load import user_code
from asyncrl.configs.objects import load_object
from asyncrl.configs.parameters import check_parameters
from asyncrl.configs.rewards import RewardEntry, reward_entries
from asyncrl.engine.errors import ConfigError

BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "exact_match": ExactMatch,
    "math_verify": MathVerify,
    "regex": Regex,
    "format": Format,
    "length": Length,
    "code": Code,
}


_WHERE = "; set it in its entry of reward.functions, or read the record's fields from prompt.answer and prompt.fields"


def load_rewards(entries: Sequence[Mapping[str, Any]]) -> list[RewardFunction]:
    """Build the functions of `reward.functions`; ConfigError if one is unknown or cannot be called as a reward."""
    functions = [load_reward(entry) for entry in reward_entries(entries)]
    for function in functions:
        if function.part in CORE_TAGS:
            raise ConfigError(
                f"reward {function.name} has the part {function.part!r}, and every group has a tag of that name; "
                "give it another `part`"
            )
    return functions


def reward_kinds(entries: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """Return how each function is called; it is imported, and no class of the user's is built."""
    return [Kind.of(_find(entry.name), _what(entry)) for entry in reward_entries(entries)]


def build_judge(entries: Sequence[Mapping[str, Any]], *, asynchronous: bool) -> RewardSum:
    """Build the functions that are async, or those that are not, as one judge."""
    kinds = reward_kinds(entries)
    chosen = [entry for entry, kind in zip(entries, kinds, strict=True) if kind.asynchronous == asynchronous]
    return reward_sum(load_rewards(chosen), asynchronous=asynchronous)


def load_reward(entry: RewardEntry) -> RewardFunction:
    """Build one function: of a class one object, with the entry's parameters; else the parameters are bound to it."""
    what, target = _what(entry), _find(entry.name)
    kind = Kind.of(target, what)
    if inspect.isclass(target):
        check_parameters(what, target, entry.parameters)
        with user_code(what):
            made: Any = target(**entry.parameters)
        call: Callable[..., Any] = made
    else:
        called_with = (*(OF_GROUP if kind.of_group else ALONE), *([REWARDS] if kind.takes_rewards else []))
        check_parameters(what, target, entry.parameters, given=called_with, explained=_WHERE)
        call = partial(target, **entry.parameters)
    return RewardFunction(entry.name, entry.part, entry.weight, kind, call)


def _what(entry: RewardEntry) -> str:
    return f"reward {entry.name}"


def _find(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return load_object(name, option="reward")
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    if name.endswith(".py"):
        hint = f"; which function of it? Write {name}:function"
    raise ConfigError(
        f"reward {name!r} is unknown{hint}; built in are {', '.join(BUILT_IN)}, and your own are module:function or "
        "file.py:function"
    )
