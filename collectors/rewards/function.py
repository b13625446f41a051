"""One reward function: user code with its name, its weight, and what it takes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

ALONE = ("prompt", "response")
OF_GROUP = ("prompt", "responses")
REWARDS = "rewards"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a reward function is called, which its signature says by the names of its parameters.

    (prompt, response): each response alone. (prompt, responses) or (prompt, responses, rewards): a whole group at once;
    `rewards` are those so far, of the functions that see one response, None for one that failed.
    """

    of_group: bool
    takes_rewards: bool
    asynchronous: bool

    @classmethod
    def of(cls, target: Any, what: str) -> "Kind":
        """Return the kind of a function, or of a class whose objects are called; ConfigError, naming what it takes."""
        call, skipped = _call_of(target, what), inspect.isclass(target)
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what}: its parameters cannot be read: {error}") from error
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise ConfigError(f"{what} is a generator, because it has a yield; a reward must return a number")
        parameters = list(signature.parameters.values())[skipped:]
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = tuple(p.name for p in positional)
        of_group = names[:2] == OF_GROUP
        takes_rewards = of_group and names[2:3] == (REWARDS,)
        # More of a function's are the configuration's to give; an object has had them in its constructor.
        more = [p.name for p in positional[2 + takes_rewards :] if p.default is p.empty] if skipped else []
        if names[:2] not in (ALONE, OF_GROUP) or more:
            # As it was written, with its stars: (*, prompt, response) is not (prompt, response).
            plain = [p.replace(annotation=p.empty) for p in parameters]
            taken = signature.replace(parameters=plain, return_annotation=signature.empty)
            raise ConfigError(
                f"{what} takes {taken}; a reward takes (prompt, response), or "
                "(prompt, responses) or (prompt, responses, rewards) to judge a whole group at once, under these names"
            )
        asynchronous = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        return cls(of_group, takes_rewards, asynchronous)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """`call` has its parameters bound; `weight` is its factor in the run's reward, and `part` names its value."""

    name: str
    part: str
    weight: float
    kind: Kind
    call: Callable[..., Any]

    def check_prompt(self, prompt: Prompt) -> None:
        """ConfigError if the function has a method `check_prompt`, and that refuses the prompt by a ValueError."""
        check = getattr(self.call, "check_prompt", None)
        if check is None:
            return
        try:
            check(prompt)
        except ValueError as error:
            raise ConfigError(f"reward {self.name} cannot score what it will be given: {error}") from error

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add to whatever the function raises that it was this one."""
        try:
            yield
        except Exception as error:  # The edge of user code: it goes on to whoever called.
            error.add_note(f"in reward {self.name}")
            raise


def _call_of(target: Any, what: str) -> Any:
    """Return what is called: the function, or the method `__call__` of a class's objects."""
    if inspect.isclass(target):
        # `target.__call__` is found for every class: it makes the objects.
        if not any("__call__" in vars(base) for base in target.__mro__):
            raise ConfigError(
                f"{what} is a class whose objects cannot be called; give it a method __call__(self, prompt, response)"
            )
        return target.__call__
    if not callable(target):
        raise ConfigError(f"{what} is {target!r}, which cannot be called; it must be a function or a class")
    return target
