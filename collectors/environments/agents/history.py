"""The messages of one sample beside its tokens.

Invariant: the tokens of the history are those that were sent and sampled; a request is only ever their continuation.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.environments.agents.chat import Chat, Refused, Reply, plain_message
from asyncrl.collectors.environments.base import Message
from asyncrl.collectors.environments.between import Between, tool_message
from asyncrl.collectors.environments.tools import BEGIN, Call, parse_calls
from asyncrl.collectors.environments.transcript import HistoryMismatch, Transcript
from asyncrl.engine.model.tokenizer import ChatTokenizer


class Rendering:
    """Messages as tokens: through the chat template with `chat`, else their texts one behind the other."""

    def __init__(self, tokenizer: ChatTokenizer, stop_ids: Sequence[int], *, chat: bool) -> None:
        self.tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._chat = chat

    def first(self, chat: Chat) -> list[int]:
        """Return the tokens of a sample's first request; ValueError if the template or the tokenizer refuses it."""
        self._check_tools(chat.tools)
        if not self._chat:
            return self.tokenizer.encode(_joined(chat.messages))
        text = self.tokenizer.chat(chat.messages, tools=chat.tools)
        missing = [name for name in _names(chat.tools) if name not in text]
        if missing:
            raise ValueError(f"the chat template does not write the tool {missing[0]!r} into a prompt")
        return self.tokenizer.encode(text)

    def more(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], last: int | None) -> list[int]:
        """Return the tokens of messages behind a turn that ended with the token `last`."""
        between = Between(self.tokenizer, self._stop_ids, chat=self._chat, tools=tools)
        return between.ids(messages if self._chat else _joined(messages), last)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        if tools and not self._chat:
            raise ValueError("tools need a chat template, and this run has none (data.chat_template)")
        if tools and BEGIN not in self.tokenizer.decode(self.tokenizer.encode_more(BEGIN)):
            raise ValueError(f"tools need {BEGIN} in texts, and the tokenizer leaves it out")


class History:
    """Empty until `asked` the first time; then requests and turns follow each other."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._messages: tuple[Message, ...] = ()
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self.transcript: Transcript | None = None
        self.turns = 0

    def behind(self, chat: Chat) -> list[int]:
        """Return the tokens that a request puts behind the history.

        HistoryMismatch if it does not begin with all messages so far; Refused if it cannot be written as tokens.
        """
        try:
            if self.transcript is None:
                return self._rendering.first(chat)
            return self._rendering.more(self._new(chat), chat.tools, self.transcript.last)
        except (ValueError, TypeError) as error:  # A tokenizer's TypeError: half of a surrogate pair.
            raise Refused(str(error), param="messages") from error

    def said(self, chat: Chat, ids: Sequence[int], asked: Sequence[int], result: Result) -> Reply:
        """Take up a request, of whose tokens `ids` are new, and the turn that was generated from `asked`."""
        if self.transcript is None:
            self.transcript = Transcript(ids)
        else:
            self.transcript.put(ids)
        self.transcript.generated(asked, result)
        text = self._rendering.tokenizer.decode(list(result.token_ids))
        finished = result.finish == "stop"
        calls = _calls(text, chat.tools) if finished else []
        reply = Reply(self.turns, text, calls, finished, len(asked), len(result.token_ids))
        self._messages, self._tools = (*chat.messages, plain_message(reply.message)), chat.tools
        self.turns += 1
        return reply

    def _new(self, chat: Chat) -> list[Message]:
        """Return the messages behind those that there are."""
        known = len(self._messages)
        for place, (ours, theirs) in enumerate(zip(self._messages, chat.messages, strict=False)):
            if not _same(ours, theirs):
                raise HistoryMismatch(
                    f"request {self.turns} has another message {place} than request {self.turns - 1} and its answer "
                    f"had: {_short(theirs)} in place of {_short(ours)}; an agent may only add messages behind an answer"
                )
        more = chat.messages[known:]
        if not more or any(message["role"] == "assistant" for message in more):
            raise HistoryMismatch(
                f"request {self.turns} has {len(chat.messages)} messages, and the history {known}, its last answer "
                "included; an agent must add messages behind an answer, none of the assistant's"
            )
        if chat.tools != self._tools:
            raise HistoryMismatch(f"request {self.turns} has other tools than request {self.turns - 1}")
        names = {call["id"]: call["function"]["name"] for call in self._messages[-1].get("tool_calls", ())}
        return [_as_output(message, names) for message in more]


def _as_output(message: Message, names: Mapping[str, str]) -> Message:
    if message["role"] != "tool":
        return message
    name = message.get("name") or names.get(message.get("tool_call_id", ""), "")
    return tool_message(name, message["content"])


def _calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Return a turn's calls; none if one cannot be read or is of no tool: then the agent is given the text."""
    calls = parse_calls(text) if tools else []
    known = set(_names(tools))
    return [] if any(call.fault or call.name not in known for call in calls) else calls


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _same(ours: Message, theirs: Message) -> bool:
    return {**ours, "name": None} == {**theirs, "name": None}


def _short(message: Message) -> str:
    text = json.dumps(dict(message))
    return text if len(text) <= 80 else f"{text[:80]}…"


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)
