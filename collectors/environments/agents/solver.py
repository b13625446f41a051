"""An environment that asks the model by itself, over HTTP, in place of answering its turns."""

from abc import ABC, abstractmethod
from typing import Any

import anyio

from asyncrl.collectors.environments.base import Environment
from asyncrl.engine.records import Prompt


class Solver(Environment, ABC):
    """Plays one sample per call of `solve`; `serve` runs for as long as the collector does."""

    @abstractmethod
    async def solve(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        """Return the sample's reward, a number or a `Reward`; whatever it raises fails the sample."""

    async def serve(self) -> None:
        """Hold what all samples need."""
        await anyio.sleep_forever()
