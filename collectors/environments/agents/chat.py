"""A request for a chat completion as it is read from its JSON, and the answer in OpenAI's form.

What would change how tokens are drawn is refused, not passed over: the trainer's ratio needs the run's distribution.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.collectors.environments.base import Message
from asyncrl.collectors.environments.tools import BEGIN, THOUGHT, Call

CONTEXT = "context_length_exceeded"
"""OpenAI's code of a request for which no room is left."""
_READ = frozenset({"messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"})
_WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier"})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Refused(Exception):
    """An answer of HTTP in place of a turn, in OpenAI's form; a client of OpenAI does not repeat a 400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Drawn:
    """How the run draws tokens, which a request may repeat and not change."""

    top_p: float
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chat:
    """What a request asks: messages with nothing but their meaning, JSON schemas of tools, the longest turn, and the
    temperature if it names one. `stream` is None for an answer in one piece, else whether its end says the usage."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    stream: bool | None = None


def read_chat(body: Any, drawn: Drawn) -> Chat:
    """Return what a request asks; Refused if it is not one, or asks for other sampling than the run's."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of at least one message", param="messages")
    _check_sampling(given, drawn)
    return Chat(
        tuple(plain_message(message) for message in messages),
        _tools(given.get("tools", [])),
        _longest(given),
        given.get("temperature"),
        _stream(given),
    )


def _check_sampling(given: Mapping[str, Any], drawn: Drawn) -> None:
    """Refuse what is not as the run has it, by name."""
    wanted = {
        "n": (1, "one sample is one conversation"),
        "logprobs": (False, "they are recorded for the trainer"),
        "top_logprobs": (0, "they are recorded for the trainer"),
        "frequency_penalty": (0, "the trainer's ratio needs the model's own distribution"),
        "presence_penalty": (0, "the trainer's ratio needs the model's own distribution"),
        "logit_bias": ({}, "the trainer's ratio needs the model's own distribution"),
        "top_p": (drawn.top_p, "rollout.top_p says so for the whole run"),
        "response_format": ({"type": "text"}, "the model is free in what it writes"),
        "tool_choice": ("auto", "the model is free in what it writes"),
        "parallel_tool_calls": (True, "the model is free in what it writes"),
    }
    for name, value in given.items():
        fits, why = wanted.get(name, (value, ""))
        if value != fits:
            raise Refused(f"{name} is {value!r} and must be {fits!r} or left out: {why}", param=name)
        if name not in {*wanted, *_READ, *_WITHOUT_EFFECT, "temperature", "stop"}:
            raise Refused(f"{name} is not supported; leave it out", param=name)
    temperature, stop = given.get("temperature", 1.0), given.get("stop", [])
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise Refused(f"temperature is {temperature!r}; it must be a number", param="temperature")
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or any(one not in drawn.stop_strings for one in stops):
        raise Refused(
            f"stop is {stop!r}, and rollout.stop_strings {list(drawn.stop_strings)}; name them there", param="stop"
        )


def _stream(given: Mapping[str, Any]) -> bool | None:
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise Refused(f"stream is {stream!r}; it must be true or false", param="stream")
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise Refused(f"stream_options is {options!r}; include_usage must be true or false", param="stream_options")
    return bool(options.get("include_usage", False)) if stream else None


def _longest(given: Mapping[str, Any]) -> int | None:
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise Refused(f"max_tokens is {limit!r}; it must be an integer of at least 1", param="max_tokens")
    return min(limits, default=None)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    fine = isinstance(tools, list) and all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not fine:
        raise Refused("tools must be a list of functions, each with a name", param="tools")
    return tuple(tools)


def plain_message(message: Any) -> Message:
    """Return a message with role, text, calls of tools and the id that it answers; Refused if it has anything else.

    So a message that a client gives back with more fields, or fields in another order, is the one that it was given.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise Refused(f"a message must be an object with a role of {', '.join(sorted(_ROLES))}", param="messages")
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content")),
    }
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in _listed(message["tool_calls"])]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, dict) else None for part in _listed(content)]
    if not all(isinstance(part, str) for part in parts):
        raise Refused("a message must hold text alone", param="messages")
    return "".join(str(part) for part in parts)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("content must be a text or a list of parts, and tool_calls a list", param="messages")
    return value


def _plain_call(call: Any) -> dict[str, Any]:
    try:
        arguments = call["function"]["arguments"]
        # Chat templates write an object; in OpenAI's form it is a text.
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": read}}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise Refused(
            "a call of a tool must have an id, a name, and arguments that are JSON", param="messages"
        ) from error


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn as it is told: its text, the calls in it, what ended it, and tokens that it was asked with and has."""

    number: int
    text: str
    calls: Sequence[Call]
    finished: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        thought, mark, said = self.text.rpartition(THOUGHT)
        front = f"{thought}{mark}{said.partition(BEGIN)[0]}"
        calls = [
            {
                "id": f"call_{self.number}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for i, call in enumerate(self.calls)
        ]
        return {"role": "assistant", "content": front.rstrip() or None, "tool_calls": calls}

    @property
    def body(self) -> dict[str, Any]:
        """What a client is answered."""
        reason = "length" if not self.finished else "tool_calls" if self.calls else "stop"
        total = self.prompt_tokens + self.completion_tokens
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }
        choice = {"index": 0, "message": self.message, "finish_reason": reason, "logprobs": None}
        return {
            "id": f"chatcmpl-{self.number}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "usage": usage,
        }


def events(reply: Reply, with_usage: bool) -> str:
    """Return an answer as a stream of events, in OpenAI's form: the message in one piece, its end, and the usage."""
    body = {**reply.body, "object": "chat.completion.chunk"}
    usage = body.pop("usage")
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    chunks = [
        {**body, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**body, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({**body, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
