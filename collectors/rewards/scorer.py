"""All reward functions of a run at work: those that see one response, and then those that see the group.

    responses ──▶ each place, each response alone ──▶ sums ──▶ each place, the whole group ──▶ sums

Invariant: a response whose score failed anywhere fails, and takes no sibling with it unless a whole group's failed.
"""

from collections.abc import Sequence

import anyio

from asyncrl.collectors.outcome import Outcome, Rules, SampleFailure
from asyncrl.collectors.question import Question
from asyncrl.collectors.scoring import Place
from asyncrl.collectors.tasks.base import Reward
from asyncrl.engine.records import Prompt


class RewardScorer:
    """A scorer over places: those in `alone` are asked about each response, those in `of_group` about the group."""

    def __init__(self, rules: Rules, *, alone: Sequence[Place], of_group: Sequence[Place]) -> None:
        self._rules = rules
        self._alone = alone
        self._of_group = of_group

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[Outcome]:
        each = [Question(prompt, (response,)) for response in responses]
        nothing: list[Outcome] = [Reward(0.0)] * len(responses)
        outcomes = self._added([nothing, *await _answers(self._alone, each)])
        rewards = tuple(outcome.value if isinstance(outcome, Reward) else None for outcome in outcomes)
        if not self._of_group or not any(reward is not None for reward in rewards):
            return outcomes
        whole = [Question(prompt, tuple(responses), rewards)]
        return self._added([outcomes, *await _answers(self._of_group, whole)])

    def close(self) -> None:
        for place in {*self._alone, *self._of_group}:
            place.close()

    def _added(self, answers: Sequence[Sequence[Outcome]]) -> list[Outcome]:
        return [self._sum(of_one) for of_one in zip(*answers, strict=True)]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        value, parts = 0.0, dict[str, float]()
        for outcome in outcomes:
            if isinstance(outcome, SampleFailure):
                return outcome
            twice = parts.keys() & outcome.parts.keys()
            if twice:
                return self._rules.failed(f"two parts of a reward are called {min(twice)!r}; give one another name")
            value += outcome.value
            parts |= outcome.parts
        try:
            return Reward(value, parts)
        except ValueError as error:  # Beyond float32.
            return self._rules.failed(error)


async def _answers(places: Sequence[Place], questions: Sequence[Question]) -> list[list[Outcome]]:
    """Ask all places at the same time."""
    answers: dict[int, list[Outcome]] = {}

    async def ask(i: int) -> None:
        answers[i] = await places[i].ask(questions)

    async with anyio.create_task_group() as tasks:
        for i in range(len(places)):
            tasks.start_soon(ask, i)
    return [answers[i] for i in range(len(places))]
