"""One sample of an environment, from its reset to its end: turns, tools, replies, and their rewards.

prompt ids ─▶ turn (sampled) ─▶ tools or step ─▶ reply (put) ─▶ turn (sampled) ─▶ … done, or a limit

Invariant: it ends in one completion, whose outcome is a reward or a failure with its cause; what it trains on is what
each turn was generated from.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.environments.base import Environment, Message, Step, Turn
from asyncrl.collectors.environments.between import Between, tool_message
from asyncrl.collectors.environments.tools import Call, read_calls
from asyncrl.collectors.environments.transcript import HistoryMismatch, Transcript
from asyncrl.collectors.environments.user_code import (
    ENVIRONMENT_ERROR,
    ENVIRONMENT_TIMEOUT,
    TOOL_ERROR,
    TOOL_TIMEOUT,
    Fault,
    answer_of,
)
from asyncrl.collectors.generators.base import Completion
from asyncrl.collectors.outcome import HISTORY_MISMATCH, Outcome, SampleFailure
from asyncrl.collectors.tasks.base import Reward, plain_number
from asyncrl.engine.model.tokenizer import Tokenizer
from asyncrl.engine.records import Prompt

Respond = Callable[[tuple[int, ...], int, int], Awaitable[Result]]
"""(ids, seed, longest turn in tokens) → the model's turn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a sample: `max_turns`, or `max_tokens` of its response, replies included; and what fails it."""

    max_turns: int
    max_tokens: int
    max_turn_tokens: int
    step_timeout_s: float
    tool_timeout_s: float
    on_tool_error: Literal["feed_back", "fail"]


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of a sample's turn: of turn 0 the sample's own, of later ones a function of it and the number."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0]) if number else seed


class Conversation:
    """Plays samples of one environment; `name` is what a configuration calls it.

    No part of a reward may have a name of `taken`, which taggers give.
    """

    def __init__(
        self,
        environment: Environment,
        name: str,
        limits: Limits,
        *,
        between: Between,
        tokenizer: Tokenizer,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self._environment = environment
        self._name = f"environment {name}"
        self._limits = limits
        self._between = between
        self._tokenizer = tokenizer
        self._taken = taken

    async def play(
        self, prompt: Prompt, ids: tuple[int, ...], *, seed: int, world_seed: int, respond: Respond
    ) -> Completion:
        """Play one sample to its end. `world_seed` is the environment's, equal for all samples of a group."""
        transcript, total = Transcript(ids), _Total(self._taken)
        try:
            finished = await self._play(prompt, transcript, total, seed=seed, world_seed=world_seed, respond=respond)
            outcome: Outcome = total.reward()
        except HistoryMismatch as error:
            finished, outcome = False, SampleFailure(HISTORY_MISMATCH, f"{self._name}: {error}")
        except Fault as fault:
            finished, outcome = False, SampleFailure(fault.cause, f"{self._name}: {fault}")
        except (TypeError, ValueError) as error:  # What the user's code returned does not fit.
            finished, outcome = False, SampleFailure(ENVIRONMENT_ERROR, f"{self._name}: {error}")
        return transcript.completion(finished=finished, outcome=outcome)

    async def _play(
        self, prompt: Prompt, transcript: Transcript, total: "_Total", *, seed: int, world_seed: int, respond: Respond
    ) -> bool:
        """Return whether the sample came to its end; False if a limit cut it."""
        limits = self._limits
        state = await self._ask("reset", lambda: self._environment.reset(prompt, world_seed))
        for number in range(limits.max_turns):
            asked, left = transcript.ids, limits.max_tokens - transcript.tokens
            result = await respond(asked, turn_seed(seed, number), min(left, limits.max_turn_tokens))
            transcript.generated(asked, result)
            turn = Turn(self._tokenizer.decode(list(result.token_ids)), number, result.finish == "stop")
            step = await self._step(state, turn)
            total.add(step)
            if step.done or not turn.finished:
                return step.done and turn.finished
            if not step.reply:
                raise ValueError("step gave no reply, and is not done; the next turn would have nothing to answer")
            reply = self._between.ids(step.reply, transcript.last)
            last = number + 1 == limits.max_turns
            if last or transcript.tokens + len(reply) >= limits.max_tokens:
                return False
            transcript.put(reply)
        return False

    async def _step(self, state: Any, turn: Turn) -> Step:
        """Run the tools that a turn calls, or have the environment answer it."""
        tools = self._environment.tools
        calls = read_calls(turn.text, tools) if tools and turn.finished else []
        if calls:
            return Step(reply=[await self._called(state, call) for call in calls])
        step = await self._ask("step", lambda: self._environment.step(state, turn))
        if not isinstance(step, Step):
            raise TypeError(f"step returned {step!r}; it must be a Step")
        return step

    async def _called(self, state: Any, call: Call) -> Message:
        """Return the message of a tool's output, or of what went wrong, unless that fails the sample."""
        try:
            if call.fault:
                raise Fault(TOOL_ERROR, call.fault)
            return tool_message(call.name, await self._output(state, call))
        except Fault as fault:
            if self._limits.on_tool_error == "fail":
                raise
            return tool_message(call.name, f"Error: {fault.what}")

    async def _output(self, state: Any, call: Call) -> str:
        (tool,) = (tool for tool in self._environment.tools if tool.name == call.name)
        output = await answer_of(
            lambda: tool.call(state, **call.arguments),
            name=f"tool {tool.name}",
            limit_s=self._limits.tool_timeout_s,
            limit_name="environment.tool_timeout_s",
            causes=(TOOL_ERROR, TOOL_TIMEOUT),
        )
        if not isinstance(output, str):
            raise Fault(TOOL_ERROR, f"tool {tool.name} returned {type(output).__name__}; it must return a text")
        return output

    async def _ask(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        return await answer_of(
            call,
            name=name,
            limit_s=self._limits.step_timeout_s,
            limit_name="environment.step_timeout_s",
            causes=(ENVIRONMENT_ERROR, ENVIRONMENT_TIMEOUT),
        )


class _Total:
    """The rewards of a sample's steps, added up."""

    def __init__(self, taken: frozenset[str]) -> None:
        self._taken = taken
        self._value = 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)

    def add(self, step: Step) -> None:
        self._value += plain_number(step.reward, what="the reward of a step")
        for name, part in dict(step.parts).items():
            if name in self._taken:
                raise ValueError(f"a part of a reward cannot be called {name!r}: a tagger gives a tag of that name")
            self._parts[name] += plain_number(part, what=f"part {name!r} of a reward")

    def reward(self) -> Reward:
        return Reward(self._value, dict(self._parts))
