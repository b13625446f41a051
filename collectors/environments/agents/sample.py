"""One sample of an agent: its requests one after the other, within its limits.

Invariant: a turn is decoded by the sample's own task, so it ends with the sample; whoever waits for an answer gets one.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from asyncrl.collectors.environments.agents.chat import CONTEXT, Chat, Refused, Reply
from asyncrl.collectors.environments.agents.history import History, Rendering
from asyncrl.collectors.environments.conversation import Limits, Respond, turn_seed
from asyncrl.collectors.environments.transcript import HistoryMismatch


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that waits; `done` once it has a reply or was refused."""

    chat: Chat
    reply: Reply | None = None
    refusal: Refused | None = None
    done: anyio.Event = field(default_factory=anyio.Event)


class AgentSample:
    """`most` is the longest conversation in tokens, `seed` the sample's own.

    `patience` is a scope whose deadline is `limits.step_timeout_s` behind the last answer, and far away while one is
    made.
    """

    def __init__(
        self, rendering: Rendering, limits: Limits, *, most: int, seed: int, temperature: float, respond: Respond
    ) -> None:
        self.history = History(rendering)
        self.patience = anyio.CancelScope()
        self.cut = False
        """Whether a limit cut a turn, or refused one."""
        self.mismatch: HistoryMismatch | None = None
        self._limits = limits
        self._most = most
        self._seed = seed
        self._temperature = temperature
        self._respond = respond
        self._waiting: set[_Asked] = set()
        self._closed = False
        self._send, self._asked = anyio.create_memory_object_stream[_Asked](math.inf)

    async def ask(self, chat: Chat) -> Reply:
        """Return the model's turn; Refused if there is none."""
        if self._closed:
            raise _ended()
        asked = _Asked(chat)
        self._waiting.add(asked)
        self._send.send_nowait(asked)
        try:
            await asked.done.wait()
        finally:
            self._waiting.discard(asked)
        if asked.refusal is not None:
            raise asked.refusal
        assert asked.reply is not None
        return asked.reply

    async def serve(self, solve: Callable[[], Awaitable[None]]) -> None:
        """Answer requests until `solve` returns, is too late, or has changed its history (`mismatch`)."""
        try:
            self._wait()
            async with anyio.create_task_group() as tasks:

                async def solving() -> None:
                    with self.patience:
                        await solve()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(solving)
                async for asked in self._asked:
                    self.patience.deadline = math.inf
                    await self._answer(asked)
                    if self.mismatch is not None:
                        tasks.cancel_scope.cancel()
                    self._wait()
        finally:
            self._close()

    async def _answer(self, asked: _Asked) -> None:
        try:
            asked.reply = await self._turn(asked.chat)
        except Refused as refusal:
            asked.refusal = refusal
        except HistoryMismatch as error:
            self.mismatch, asked.refusal = error, Refused(str(error), param="messages", code="history_mismatch")
        asked.done.set()

    async def _turn(self, chat: Chat) -> Reply:
        limits, history = self._limits, self.history
        if chat.temperature not in (None, self._temperature):
            raise Refused(
                f"temperature is {chat.temperature}, and that of the run {self._temperature} (rollout.temperature; in "
                "an evaluation evaluation.temperature), which the trainer's ratio needs; leave it out",
                param="temperature",
            )
        if self.cut:
            raise _over("a limit has ended this sample")
        ids = history.behind(chat)
        so_far = () if history.transcript is None else history.transcript.ids
        left = self._most - len(so_far) - len(ids)
        if history.turns == limits.max_turns or left < 1:
            self.cut = True
            if left < 1:
                raise _over(f"the request leaves no room within {self._most} tokens (environment.max_tokens)")
            raise _over(f"the sample has had its {limits.max_turns} turns (environment.max_turns)")
        asked = (*so_far, *ids)
        longest = min(left, limits.max_turn_tokens, chat.max_tokens or left)
        result = await self._respond(asked, turn_seed(self._seed, history.turns), longest)
        reply = history.said(chat, ids, asked, result)
        self.cut = not reply.finished
        return reply

    def _wait(self) -> None:
        self.patience.deadline = anyio.current_time() + self._limits.step_timeout_s

    def _close(self) -> None:
        self._closed = True
        self._send.close()
        self._asked.close()
        for asked in self._waiting:
            if not asked.done.is_set():
                asked.refusal = _ended()
                asked.done.set()


def _over(why: str) -> Refused:
    return Refused(f"{why}; the agent must return its reward now", code=CONTEXT)


def _ended() -> Refused:
    return Refused("the sample of this key has ended", code="invalid_api_key", status=401)
