"""Collectors with an environment around a scripted engine, in virtual time; and a tokenizer with a chat template."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.engines.base import Request, Result, Sampling
from asyncrl.collectors.environments.agents.chat import Drawn
from asyncrl.collectors.environments.agents.history import Rendering
from asyncrl.collectors.environments.agents.play import AgentPlay
from asyncrl.collectors.environments.agents.proxy import Proxy
from asyncrl.collectors.environments.agents.solver import Solver
from asyncrl.collectors.environments.base import Environment
from asyncrl.collectors.environments.between import Between
from asyncrl.collectors.environments.conversation import Conversation, Limits
from asyncrl.collectors.environments.generator import EnvironmentGenerator
from asyncrl.collectors.environments.tools import schemas
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.collectors.tasks import Task
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, Prompt
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.message import Message, PutNotice
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.scripted_engine import ScriptedEngine
from asyncrl.engine.weights.base import InProcess

STATE = {"w": torch.zeros(2)}
Say = Callable[[Request], Sequence[int]]
"""The tokens of the turn that a request asks for."""


class ChatML:
    """Characters of Latin-1 as tokens from 10 on, the marks of ChatML as 1 and 2; a template as Qwen's."""

    pad_id, eos_id, vocab_size = 0, 2, 300
    has_chat_template = True
    marks: Mapping[str, int] = {"<|im_start|>": 1, "<|im_end|>": 2}

    def encode(self, text: str) -> list[int]:
        parts = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        return [
            token
            for part in parts
            for token in ([self.marks[part]] if part in self.marks else [10 + ord(c) for c in part])
        ]

    encode_more = encode

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 10) for i in ids if i >= 10)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        text = "".join(f"[{tool['function']['name']}]" for tool in tools)
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool":
                role, content = "user", f"<tool_response>{content}</tool_response>"
            text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
        return f"{text}<|im_start|>assistant\n"


class GroupsEngine(ScriptedEngine):
    """Takes groups; the sizes of its batches go into `batches`."""

    def __init__(self, batches: list[int] | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes = batches

    async def generate_group(self, requests: Sequence[Request], begun: Callable[[], None]) -> list[Result]:
        results: dict[str, Result] = {}

        async def one(request: Request) -> None:
            async for item in self.generate(request):
                begun()
                if isinstance(item, Result):
                    results[request.id] = item

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
        return [results[request.id] for request in requests]

    async def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        assert self._sizes is not None
        self._sizes.append(len(requests))
        return await self.generate_group(requests, lambda: None)


@dataclass
class Table:
    """A collector at work, the generator in it, and what its engine was asked."""

    collector: Collector
    generator: EnvironmentGenerator
    plane: LocalPlane
    asked: list[Request]

    async def group(self, prompt: Prompt, *, size: int = 1) -> tuple[Any, dict[str, list[Any]]]:
        """Have one group played: what was put, its tags and its columns; or the failure."""
        await self.collector.grant([Grant(0, prompt, size, 3)])
        message: Message = (await self.collector.events(0, 1e6))[0][1]
        while not isinstance(message, PutNotice):
            return message, {}
        return message.group, await self.plane.read("train", message.group.keys, COLUMNS)


def at_table(
    environment: Environment,
    say: Say,
    work: Callable[[Table], Awaitable[Any]],
    *,
    tokenizer: Any = None,
    size: int = 1,
    max_turns: int = 4,
    max_tokens: int = 200,
    max_turn_tokens: int = 100,
    taggers: dict[str, Any] | None = None,
    on_tool_error: Any = "feed_back",
    reward_on_failure: float | None = None,
    batches: list[int] | None = None,
    step_timeout_s: float = 30.0,
) -> Any:
    """Run `work` beside a collector whose model says what `say` makes of a request.

    With `batches` groups that were granted together go in step; it is given the sizes of what decoded together.
    Agents ask over real sockets, so they run in real time.
    """
    tokenizer = tokenizer or CharTokenizer()
    asked: list[Request] = []
    agent = isinstance(environment, Solver)

    def make(request: Request, index: int, version: int) -> int:
        if not index:
            asked.append(request)
        return say(request)[index]

    async def main() -> Any:
        plane = LocalPlane(clock=virtual_clock)
        await plane.register(Partition("train", size, COLUMNS, ("trainer",)))
        engine = GroupsEngine(batches, STATE, make=make, token_s=0.0 if agent else 0.1)
        sampling = Sampling(max_turn_tokens, stop_ids=(tokenizer.eos_id,))
        limits = Limits(max_turns, max_tokens, max_turn_tokens, step_timeout_s, 5.0, on_tool_error)
        chat, taken = tokenizer.has_chat_template, frozenset(taggers or {})
        turns = EngineGenerator(engine, sampling, groups=None if batches is None else engine, exact=batches is not None)
        if isinstance(environment, Solver):
            rendering, proxy = Rendering(tokenizer, [tokenizer.eos_id], chat=chat), Proxy(Drawn(1.0, ("7",)))
            play = AgentPlay(environment, limits, rendering=rendering, proxy=proxy, temperature=1.0, taken=taken)
            generator = EnvironmentGenerator(turns, play, beside=play.run)
        else:
            between = Between(tokenizer, [tokenizer.eos_id], chat=chat, tools=schemas(environment.tools))
            conversation = Conversation(environment, "mine", limits, between=between, tokenizer=tokenizer, taken=taken)
            generator = EnvironmentGenerator(turns, conversation)
        collector = Collector(
            "collector0",
            CollectorSettings("train", 1.0, max_turn_tokens, 300.0, 600.0, 30.0, 0, reward_on_failure),
            generator=generator,
            scorer=in_place_scorer(Task()),
            tokenizer=tokenizer,
            plane=plane,
            transport=InProcess(),
            taggers=taggers,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            result = await work(Table(collector, generator, plane, asked))
            tasks.cancel_scope.cancel()
        return result

    return anyio.run(main) if agent else run_virtual(main)


@pytest.fixture
def table() -> Callable[..., Any]:
    return at_table


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return STATE


@pytest.fixture
def chat_ml() -> ChatML:
    return ChatML()


@pytest.fixture(scope="module")
def chat_ml_once() -> ChatML:
    return ChatML()
