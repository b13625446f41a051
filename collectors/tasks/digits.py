"""Two tasks that a tiny model learns on a laptop: echo a digit, reverse three."""

from abc import abstractmethod
from collections.abc import Sequence

from asyncrl.collectors.tasks.base import Reward, Task
from asyncrl.engine.records import Prompt


class _ExactDigits(Task):
    """Prompt `<digits>>`; reward 1 for exactly the answer and then the end token."""

    _count: int

    @abstractmethod
    def _answer(self, digits: str) -> str: ...

    def prompts(self) -> Sequence[Prompt]:
        numbers = (f"{i:0{self._count}d}" for i in range(10**self._count))
        name = type(self).__name__.lower()
        return [
            Prompt(id=i, text=f"{digits}>", answer=self._answer(digits), dataset=name)
            for i, digits in enumerate(numbers)
        ]

    def evaluation_prompts(self) -> Sequence[Prompt]:
        """Return the prompts of training, which are all that this task has."""
        return self.prompts()

    def score(self, prompt: Prompt, response: str) -> Reward | float:
        return float(response == prompt.answer)


class Echo(_ExactDigits):
    """`7>` asks for `7`."""

    _count = 1

    def _answer(self, digits: str) -> str:
        return digits


class Reverse(_ExactDigits):
    """`123>` asks for `321`."""

    _count = 3

    def _answer(self, digits: str) -> str:
        return digits[::-1]
