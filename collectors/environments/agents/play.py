"""Plays samples of an agent: lets its function ask the model, and makes one completion of what it asked and heard."""

import math
from typing import Any

import anyio

from asyncrl.collectors.environments.agents.agent import reward_of
from asyncrl.collectors.environments.agents.history import Rendering
from asyncrl.collectors.environments.agents.proxy import Proxy
from asyncrl.collectors.environments.agents.sample import AgentSample
from asyncrl.collectors.environments.agents.solver import Solver
from asyncrl.collectors.environments.conversation import Limits, Respond
from asyncrl.collectors.environments.user_code import ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT, Fault, answer_of
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.outcome import HISTORY_MISMATCH, Outcome, SampleFailure
from asyncrl.engine.records import Prompt

_CAUSES = (ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT)


class AgentPlay:
    """As a Conversation, with the world on the other side of `proxy`. `temperature` is that of the run's tokens."""

    def __init__(
        self,
        agent: Solver,
        limits: Limits,
        *,
        rendering: Rendering,
        proxy: Proxy,
        temperature: float,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self._agent = agent
        self._limits = limits
        self._rendering = rendering
        self._proxy = proxy
        self._temperature = temperature
        self._taken = taken

    async def run(self) -> None:
        """Serve the model's address, and what the agent needs beside it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._proxy.run)
            tasks.start_soon(self._agent.serve)

    async def play(
        self, prompt: Prompt, ids: tuple[int, ...], *, seed: int, world_seed: int, respond: Respond
    ) -> Completion:
        """Play one sample to its end. The tokens of its record, `ids`, only count: with `max_tokens` they limit it."""
        sample = AgentSample(
            self._rendering,
            self._limits,
            most=len(ids) + self._limits.max_tokens,
            seed=seed,
            temperature=self._temperature,
            respond=respond,
        )
        outcome = await self._outcome(prompt, sample)
        transcript = sample.history.transcript
        if transcript is None:
            return Completion((), (), (), False, outcome=outcome)
        return transcript.completion(
            finished=not sample.cut and not isinstance(outcome, SampleFailure), outcome=outcome, with_prompt=True
        )

    async def _outcome(self, prompt: Prompt, sample: AgentSample) -> Outcome:
        try:
            reward = reward_of(await self._solved(prompt, sample), self._taken)
            if not sample.history.turns:
                raise ValueError("the agent asked for no turn of the model, so there is nothing to train")
            return reward
        except Fault as fault:
            return SampleFailure(fault.cause, f"agent: {fault}")
        except (TypeError, ValueError) as error:  # What the user's function returned does not fit.
            return SampleFailure(ENVIRONMENT_ERROR, f"agent: {error}")

    async def _solved(self, prompt: Prompt, sample: AgentSample) -> Any:
        """Return what the function returned; Fault if it did not."""
        answers: list[Any] = []
        faults: list[Fault] = []
        async with self._proxy.admit(sample) as (base_url, api_key):

            async def solve() -> None:
                try:
                    answers.append(
                        await answer_of(
                            lambda: self._agent.solve(prompt, base_url, api_key),
                            name="the function",
                            limit_s=math.inf,
                            limit_name="",
                            causes=_CAUSES,
                        )
                    )
                except Fault as fault:
                    faults.append(fault)

            await sample.serve(solve)
        if sample.mismatch is not None:
            raise Fault(HISTORY_MISMATCH, str(sample.mismatch))
        if sample.patience.cancelled_caught:
            limit = self._limits.step_timeout_s
            what = f"the function took longer than {limit:g} s (environment.step_timeout_s) to go on"
            raise Fault(ENVIRONMENT_TIMEOUT, what)
        if faults:
            raise faults[0]
        return answers[0]
