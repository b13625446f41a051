"""A harness of verifiers in the collector's process: a chat with the task's tools, without a program per sample.

verifiers' own `null` does the same in a process of its own, which it makes with uv, for every sample.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal

import aiohttp
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content
from verifiers.v1.runtimes import ProgramResult

from asyncrl.collectors.environments.agents.chat import CONTEXT

__all__ = ["Chat"]


class ChatConfig(HarnessConfig):
    on_tool_error: Literal["feed_back", "fail"] = "feed_back"
    """What an error of a tool does: the model is told, or the sample fails."""


class Chat(Harness[ChatConfig]):
    """Asks until an answer calls no tool, or the sample's limits leave no room."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            said.append({"role": "user", "content": prompt})
        else:
            said += [message_to_wire(message) for message in prompt or []]
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack), on_error=self.config.on_tool_error)
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            body: dict[str, Any] = {"model": ctx.model, "messages": said}
            if tools.schemas:
                body["tools"] = tools.schemas
            return await _talk(http, f"{endpoint}/chat/completions", body, tools)


async def _talk(http: aiohttp.ClientSession, url: str, body: dict[str, Any], tools: "_Tools") -> ProgramResult:
    while True:
        async with http.post(url, json=body) as answer:
            if answer.status != 200:
                text = await answer.text()
                # Without room the conversation is at its end, and is scored as it is.
                return ProgramResult(0 if CONTEXT in text else 1, "", f"the model's answer was {answer.status}: {text}")
            message = (await answer.json())["choices"][0]["message"]
        body["messages"].append(message)
        if not message.get("tool_calls"):
            return ProgramResult(0, "", "")
        for call in message["tool_calls"]:
            output = await tools.output(call["function"]["name"], call["function"]["arguments"])
            body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": output})


class _Tools:
    """A rollout's tools; `dispatch` has server and name of each, by the name that the model calls it."""

    def __init__(
        self,
        schemas: list[dict[str, Any]],
        dispatch: Mapping[str, tuple[str, str]],
        servers: Mapping[str, Any],
        *,
        on_error: Literal["feed_back", "fail"],
    ) -> None:
        self.schemas = schemas
        self._dispatch = dispatch
        self._servers = servers
        self._on_error = on_error

    async def output(self, name: str, arguments: str) -> Any:
        """Return what a call gives, its error included; RuntimeError for an error that fails the sample."""
        server, tool = self._dispatch[name]
        result = await self._servers[server].run(lambda client: client.call_tool(tool, json.loads(arguments)))
        content = mcp_content_to_chat_content(result.content)
        if result.is_error and self._on_error == "fail":
            raise RuntimeError(f"tool {name}: {content}")
        return content
