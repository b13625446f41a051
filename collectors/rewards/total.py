"""The run's reward functions as judges: their weighted sum is the reward, and each value is a part of it.

Example: weights 1 and 0.5, values 1 and 0.2: the reward is 1.1, its parts are 1 and 0.2.
"""

from collections.abc import Sequence
from typing import Any

from asyncrl.collectors.rewards.function import RewardFunction
from asyncrl.collectors.tasks.base import Reward, plain_number
from asyncrl.engine.records import Prompt


class RewardSum:
    """The functions that are not async, called one after the other."""

    extras: Sequence[str] = ()

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._alone = [function for function in functions if not function.kind.of_group]
        self._of_group = [function for function in functions if function.kind.of_group]

    def score(self, prompt: Prompt, response: str) -> Any:
        """Return the sum over the functions that see one response."""
        total = _Total()
        for function in self._alone:
            with function.named_in_errors():
                total.add(function, function.call(prompt, response))
        return total.reward

    def score_group(self, prompt: Prompt, responses: Sequence[str], rewards: Sequence[float | None]) -> Any:
        """Return, for each response, the sum over the functions that see the whole group."""
        totals = [_Total() for _ in responses]
        for function in self._of_group:
            with function.named_in_errors():
                _add_to_all(totals, function, _call(function, prompt, responses, rewards))
        return [total.reward for total in totals]


class AsyncRewardSum(RewardSum):
    """The functions that are async, awaited one after the other; responses are scored at the same time."""

    async def score(self, prompt: Prompt, response: str) -> Any:
        total = _Total()
        for function in self._alone:
            with function.named_in_errors():
                total.add(function, await function.call(prompt, response))
        return total.reward

    async def score_group(self, prompt: Prompt, responses: Sequence[str], rewards: Sequence[float | None]) -> Any:
        totals = [_Total() for _ in responses]
        for function in self._of_group:
            with function.named_in_errors():
                _add_to_all(totals, function, await _call(function, prompt, responses, rewards))
        return [total.reward for total in totals]


def reward_sum(functions: Sequence[RewardFunction], *, asynchronous: bool) -> RewardSum:
    """Return the judge of the functions that are async, or of those that are not."""
    chosen = [function for function in functions if function.kind.asynchronous == asynchronous]
    return AsyncRewardSum(chosen) if asynchronous else RewardSum(chosen)


class _Total:
    """A sum in the making, for one response."""

    def __init__(self) -> None:
        self._value = 0.0
        self._parts: dict[str, float] = {}

    def add(self, function: RewardFunction, given: Any) -> None:
        reward = given if isinstance(given, Reward) else Reward(given)
        if reward.extras:
            raise ValueError(f"it brings the extras {sorted(reward.extras)}; only a task can attach tensors")
        value = plain_number(reward.value, what="a reward")
        # Weight 0: a value to look at. Times 0 an infinite one would be NaN.
        if function.weight:
            self._value += function.weight * value
        for name, part in ((function.part, value), *reward.parts.items()):
            if name in self._parts:
                raise ValueError(f"two parts of a reward are called {name!r}; give one another name")
            self._parts[name] = part

    @property
    def reward(self) -> Reward:
        return Reward(self._value, self._parts)


def _call(function: RewardFunction, prompt: Prompt, responses: Sequence[str], rewards: Sequence[float | None]) -> Any:
    # Lists of its own: what it sorts or changes stays with it.
    more = [list(rewards)] if function.kind.takes_rewards else []
    return function.call(prompt, list(responses), *more)


def _add_to_all(totals: Sequence[_Total], function: RewardFunction, given: Any) -> None:
    values = list(given)
    if len(values) != len(totals):
        raise ValueError(f"it gave {len(values)} rewards for a group of {len(totals)} responses; it must be one each")
    for total, value in zip(totals, values, strict=True):
        total.add(function, value)
