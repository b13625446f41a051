"""A task's prompts and examples for the SFT warm-up: requested once, checked, and converted to plain types."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.collectors.tasks.base import Task
from asyncrl.collectors.tasks.load import user_code
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

_LARGEST_ID = 2**63


def list_prompts(task: Task, name: str, *, option: str = "task.name") -> list[Prompt]:
    """Return one epoch's prompts, their ids plain integers or strings; ConfigError, with the prompt, if one is not
    valid. `option` is the one that names the task."""
    with user_code(f"{option} {name}: prompts() failed"):
        given = list(task.prompts())
    if not given:
        raise ConfigError(
            f"{option} {name}: it has no prompts; list some in prompts(), or give a file with --data FILE"
        )
    return _checked(given, f"{option} {name}")


def list_evaluation_prompts(task: Task, name: str, *, option: str = "task.name") -> list[Prompt]:
    """Return the task's prompts for evaluations, checked as those of `list_prompts` are."""
    with user_code(f"{option} {name}: evaluation_prompts() failed"):
        given = list(task.evaluation_prompts())
    if not given:
        raise ConfigError(
            f"{option} {name}: it has no prompts for evaluations; list some in evaluation_prompts(), or name a "
            "file (evaluation.path)"
        )
    return _checked(given, f"{option} {name}")


def _checked(given: Sequence[Any], what: str) -> list[Prompt]:
    """Return prompts with plain ids; ConfigError, with the prompt, if one is not valid or an id repeats."""
    prompts = [_plain_prompt(prompt, f"{what}: prompt number {i}") for i, prompt in enumerate(given)]
    places: dict[int | str, int] = {}
    for i, prompt in enumerate(prompts):
        first = places.setdefault(prompt.id, i)
        if first != i:
            raise ConfigError(
                f"{what}: prompt ids repeat: prompts number {first} and {i} both have {prompt.id!r}; "
                "they must be unique"
            )
    return prompts


def list_examples(task: Task, name: str, *, option: str = "task.name") -> list[tuple[str, str]]:
    """Return (prompt, answer) pairs for the SFT warm-up; ConfigError, with the pair, if one is not two texts."""
    with user_code(f"{option} {name}: examples() failed"):
        given = list(task.examples())
    if not given:
        raise ConfigError(
            f"{option} {name}: examples() has none, and trainer.sft_warm_up_steps asks for some; set it to 0"
        )
    for i, pair in enumerate(given):
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise ConfigError(
                f"{option} {name}: example number {i} is {pair!r}; the warm-up needs (prompt, answer), two strings. "
                "Override examples(), or set trainer.sft_warm_up_steps to 0"
            )
    return [(str(prompt), str(answer)) for prompt, answer in given]


def _plain_prompt(prompt: Any, what: str) -> Prompt:
    """Return the prompt with plain values: a log cannot write subclasses of int or str, such as NumPy's."""
    if not isinstance(prompt, Prompt):
        raise ConfigError(f"{what} is {prompt!r}; it must be a Prompt")
    for field in ("text", "dataset"):
        value = getattr(prompt, field)
        if not isinstance(value, str):
            raise ConfigError(f"{what}, id {prompt.id!r}, has {value!r} as its {field}; it must be a string")
    if not prompt.text:
        raise ConfigError(f"{what}: prompt {prompt.id!r} has no text; generation needs at least one token")
    return replace(prompt, id=_plain_id(prompt.id, what), text=str(prompt.text), dataset=str(prompt.dataset))


def _plain_id(value: Any, what: str) -> int | str:
    if isinstance(value, str):
        return str(value)
    number = None if isinstance(value, bool) else _index(value)
    if number is None or not -_LARGEST_ID <= number < _LARGEST_ID:
        raise ConfigError(
            f"{what} has the id {value!r}, of type {type(value).__name__}; it must be a string or an integer of 64 bits"
        )
    return number


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
