"""Tools: how they are declared, and how a turn's calls of them are read.

A call is written as Hermes and Qwen models do it, any number of times in a turn, behind its reasoning if it has any:

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "2 * 3"}}
    </tool_call>
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
THOUGHT = "</think>"
_CALL = re.compile(rf"{BEGIN}(.*?)(?:{END}|$)", re.S)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `parameters` is the JSON schema of its arguments, an object.

    `call(state, **arguments)` is async and returns a text; `state` is the sample's.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Awaitable[str]]

    @property
    def schema(self) -> dict[str, Any]:
        """What a chat template is given."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


Tools = Sequence[Tool]


def schemas(tools: Tools) -> list[dict[str, Any]]:
    """Return what a chat template is given of tools."""
    return [tool.schema for tool in tools]


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a turn: the tool's name and arguments, or what is wrong with it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


def read_calls(text: str, tools: Tools) -> list[Call]:
    """Return the calls in a turn's text, in order; one that cannot be made has a `fault`.

    What is said of calls before `</think>` is not one.
    """
    by_name = {tool.name: tool for tool in tools}
    return [_checked(call, by_name) for call in parse_calls(text)]


def parse_calls(text: str) -> list[Call]:
    """Return the calls in a turn's text, of whichever tools; one that cannot be read has a `fault`."""
    return [_read(found.group(1)) for found in _CALL.finditer(text.rpartition(THOUGHT)[2])]


def _read(text: str) -> Call:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call("", fault=f"the call is not JSON: {error}")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return Call("", fault='the call must be an object with "name" and "arguments"')
    name, arguments = given["name"], given.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(name, fault='"arguments" must be an object')
    return Call(name, arguments)


def _checked(call: Call, tools: Mapping[str, Tool]) -> Call:
    if call.fault:
        return call
    if call.name not in tools:
        return Call(call.name, fault=f"there is no tool {call.name!r}; there are {', '.join(tools)}")
    return Call(call.name, call.arguments, _fault(tools[call.name], call.arguments))


def _fault(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Say which argument is missing or unknown; types are the tool's own matter."""
    known = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"{tool.name} needs the argument {missing[0]!r}"
    unknown = [name for name in arguments if name not in known]
    return f"{tool.name} has no argument {unknown[0]!r}" if unknown else ""
