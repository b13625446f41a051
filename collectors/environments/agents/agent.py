"""The environment `agent`: a function that asks the model by itself, and says what its answer is worth."""

import inspect
import math
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import anyio

from asyncrl.collectors.environments.agents.solver import Solver
from asyncrl.collectors.tasks.base import Reward, plain_number
from asyncrl.configs.objects import load_object
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt

_OPTION = "environment.options.function"


class Agent(Solver):
    """`function` is `module:function` (also `file.py:function`), called as function(prompt, base_url, api_key).

    It returns a number or a `Reward`. An async one runs in the collector's event loop, another one in a thread.
    """

    def __init__(self, function: str) -> None:
        if not isinstance(function, str):
            raise ValueError(f"{_OPTION} is {function!r}; it must be module:function")
        self._function: Callable[..., Any] = load_object(function, option=_OPTION)
        if not callable(self._function):
            raise ConfigError(f"{_OPTION} {function} is {self._function!r}, which cannot be called")
        try:
            inspect.signature(self._function).bind(None, "", "")
        except TypeError as error:
            what = f"{_OPTION} {function} cannot be called with (prompt, base_url, api_key)"
            raise ConfigError(f"{what}: {error}") from error
        if find_spec("aiohttp") is None:
            raise ConfigError("environment.name agent needs aiohttp: pip install 'asyncrl[agents]'")
        self._threads: anyio.CapacityLimiter | None = None

    async def solve(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        """Return what the function does; a thread that is given up goes on until its next request is refused."""
        if inspect.iscoroutinefunction(self._function):
            return await self._function(prompt, base_url, api_key)
        # anyio's own 40 threads would hold the samples of a step that wait for the other ones.
        self._threads = self._threads or anyio.CapacityLimiter(math.inf)
        answer = await anyio.to_thread.run_sync(
            self._function, prompt, base_url, api_key, abandon_on_cancel=True, limiter=self._threads
        )
        return await answer if isinstance(answer, Awaitable) else answer


def reward_of(answer: Any, taken: frozenset[str]) -> Reward:
    """Return what a function returned as a reward; TypeError or ValueError if it is not one.

    No part may have a name of `taken`, which taggers give.
    """
    if not isinstance(answer, Reward):
        return Reward(plain_number(answer, what="what the agent returned"))
    if answer.extras:
        raise ValueError(f"an agent cannot attach extras, and returned {sorted(answer.extras)}")
    odd = sorted(taken.intersection(answer.parts))
    if odd:
        raise ValueError(f"a part of a reward cannot be called {odd[0]!r}: a tagger gives a tag of that name")
    parts = {name: plain_number(part, what=f"part {name!r} of a reward") for name, part in answer.parts.items()}
    return Reward(plain_number(answer.value, what="the reward of an agent"), parts)
