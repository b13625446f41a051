"""Questions of the package reasoning-gym, where a wrong answer may be mended."""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.collectors.environments.base import Environment, Step, Turn
from asyncrl.collectors.tasks.reasoning_gym import ReasoningGym
from asyncrl.engine.records import Prompt


class SecondChance(Environment):
    """The prompts of the task `reasoning_gym`, with its options. A wrong answer is answered by `reply`, up to
    `environment.max_turns` times; the reward is 1 for the right one, divided by the number of answers.
    """

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, Any] | None],
        size: int = 1000,
        few_shot: int = 4,
        seed: int = 0,
        reply: str = "Wrong. Try again.\nAnswer:",
    ) -> None:
        if not reply:
            raise ValueError("reply is empty; it must say that an answer was wrong")
        self._task = ReasoningGym(datasets, size, few_shot, seed)
        self._reply = reply

    def prompts(self) -> Sequence[Prompt]:
        return self._task.prompts()

    async def reset(self, prompt: Prompt, seed: int) -> str:
        return prompt.answer

    async def step(self, state: Any, turn: Turn) -> Step:
        if turn.text.strip() == state:
            return Step(done=True, reward=1 / (turn.number + 1))
        return Step(self._reply)
