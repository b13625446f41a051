"""Questions that the package reasoning-gym makes, with a few answered ones in front; the answer must be exact."""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.collectors.data.prompts import share_of
from asyncrl.collectors.tasks.base import Reward, Task
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt


class ReasoningGym(Task):
    """`size` questions of each data set of reasoning-gym, made from `seed`.

    `datasets` has the parameters of each by its name: `{"chain_sum": {"min_terms": 2, "max_terms": 2}}`. In front of a
    question are `few_shot` other ones of its data set with their answers, an empty line behind each:

        Question: What is 3 + 4?
        Answer: 7

        Question: What is 1 + 5?
        Answer:

    With `few_shot` 0 a prompt is the question alone. A response is right if it is the answer, without the blanks around
    it. A run should end responses at the line's end (`rollout.stop_strings`).

    `holdout` is the share of the questions that evaluations ask and training does not, chosen by a hash of the
    question: one that small data sets repeat is on one side only.
    """

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, Any] | None],
        size: int = 1000,
        few_shot: int = 4,
        seed: int = 0,
        holdout: float = 0.0,
    ) -> None:
        if not isinstance(datasets, Mapping) or not datasets:
            raise ValueError(
                f"datasets is {datasets!r}; it must have the parameters of one data set or more by name, "
                "as in {chain_sum: {}}"
            )
        if size < 1 or few_shot < 0:
            raise ValueError(f"size is {size} and few_shot {few_shot}; they must be at least 1 and 0")
        self._datasets = {name: dict(parameters or {}) for name, parameters in datasets.items()}
        self._size = size
        self._few_shot = few_shot
        self._seed = seed
        if not 0 <= holdout < 1:
            raise ValueError(f"holdout is {holdout}; it must be at least 0 and less than 1")
        self._holdout = holdout

    def prompts(self) -> Sequence[Prompt]:
        return [prompt for name in self._datasets for prompt in self._of(name, held_out=False)]

    def evaluation_prompts(self) -> Sequence[Prompt]:
        """Return the questions held out, each once."""
        if not self._holdout:
            raise ConfigError("reasoning_gym holds no question out for evaluations; set holdout in task.options")
        found = [prompt for name in self._datasets for prompt in self._of(name, held_out=True)]
        return list({(prompt.dataset, prompt.text): prompt for prompt in reversed(found)}.values())

    def score(self, prompt: Prompt, response: str) -> Reward | float:
        return float(response.strip() == prompt.answer)

    def _of(self, name: str, *, held_out: bool) -> list[Prompt]:
        pairs = self._pairs(name)
        shots, rest = pairs[: self._few_shot], pairs[self._few_shot :]
        front = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shots)
        return [
            Prompt(
                id=f"{name}:{i}",
                text=f"{front}Question: {question}\nAnswer:" if shots else question,
                answer=answer,
                dataset=name,
            )
            for i, (question, answer) in enumerate(rest)
            # Small data sets repeat themselves, and such a prompt would hold its own answer.
            if (question, answer) not in shots and (share_of(question) < self._holdout) is held_out
        ]

    def _pairs(self, name: str) -> list[tuple[str, str]]:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError(
                f"task.name reasoning_gym makes its questions with the package reasoning-gym, which cannot be imported "
                f"({error}): install it with scripts/install smollm2 or pip install 'asyncrl[smollm2]'"
            ) from error
        parameters = {"seed": self._seed, "size": self._few_shot + self._size, **self._datasets[name]}
        entries = reasoning_gym.create_dataset(name, **parameters)
        return [(str(entry["question"]).strip(), str(entry["answer"]).strip()) for entry in entries]
