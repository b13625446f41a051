"""A task that costs time and no computation: to study the loop itself, and to check what a simulation predicts."""

import math
import random

import anyio

from asyncrl.collectors.tasks.base import Reward
from asyncrl.collectors.tasks.digits import Echo
from asyncrl.engine.records import Prompt


class Sleepy(Echo):
    """Echo's prompts; scoring sleeps log-normal `seconds` on average, and the reward is a coin's."""

    def __init__(self, seconds: float = 0.5, sigma: float = 0.5, seed: int = 0) -> None:
        if seconds <= 0 or sigma < 0:
            raise ValueError(f"seconds is {seconds} and sigma {sigma}; they must be positive, and not negative")
        self._mu = math.log(seconds) - sigma**2 / 2
        self._sigma = sigma
        self._rng = random.Random(seed)

    async def score(self, prompt: Prompt, response: str) -> Reward | float:  # type: ignore[override]
        reward = float(self._rng.random() < 0.5)
        await anyio.sleep(self._rng.lognormvariate(self._mu, self._sigma))
        return reward
