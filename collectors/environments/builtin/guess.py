"""Find a number by guesses: several turns, no tools, and characters that the small model of a plain run knows."""

import random
from collections.abc import Sequence
from typing import Any

from asyncrl.collectors.environments.base import Environment, Step, Turn
from asyncrl.engine.records import Prompt


class Guess(Environment):
    """`9>` asks for a number from 0 to 9. To a guess that is not the one it says `h>` (higher), `l>` (lower), or `n>`
    if it is not a number.

    The reward is 1 for the right number, divided by the number of guesses; 0 if it is never named.
    """

    def __init__(self, numbers: int = 10, games: int = 200, seed: int = 0) -> None:
        if numbers < 2 or games < 1:
            raise ValueError(f"numbers is {numbers} and games {games}; they must be at least 2 and 1")
        self._numbers = numbers
        self._games = games
        self._seed = seed

    def prompts(self) -> Sequence[Prompt]:
        rng = random.Random(self._seed)
        return [
            Prompt(id=i, text=f"{self._numbers - 1}>", answer=str(rng.randrange(self._numbers)), dataset="guess")
            for i in range(self._games)
        ]

    async def reset(self, prompt: Prompt, seed: int) -> int:
        return int(prompt.answer)

    async def step(self, state: Any, turn: Turn) -> Step:
        if not turn.text.isdigit():
            return Step("n>")
        guess = int(turn.text)
        if guess == state:
            return Step(done=True, reward=1 / (turn.number + 1))
        return Step("h>" if guess < state else "l>")
