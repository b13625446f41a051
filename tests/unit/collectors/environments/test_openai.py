"""The package openai as an agent's client: what it asks, streams and raises is as with OpenAI."""

import json
from typing import Any

import pytest

from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.tasks.base import Reward
from asyncrl.engine.records import Prompt
from asyncrl.engine.records.columns import TOKENS

openai = pytest.importorskip("openai")
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'


def agent(name: str) -> Any:
    return load_environment("agent", {"function": f"{__name__}:{name}"})


async def streams(prompt: Prompt, base_url: str, api_key: str) -> Reward:
    """Ask in a stream, run the tool, ask again in one piece, and meet each kind of error."""
    asked: dict[str, Any] = {"model": "any", "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(messages=messages, **asked)
        with pytest.raises(openai.BadRequestError, match="n is 2") as refused:
            await client.chat.completions.create(messages=messages, n=2, **asked)
        assert refused.value.param == "n"
        options = {"include_usage": True}
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                messages=messages, stream=True, stream_options=options, **asked
            )
        ]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert [delta.content for delta in deltas if delta.content] == ["I add."]
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "tool_calls"]
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        message = {"role": "assistant", "content": "I add.", "tool_calls": [call.model_dump(exclude={"index"})]}
        output = str(sum(json.loads(call.function.arguments).values()))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": output}]
        answer = await client.chat.completions.create(messages=messages, **asked)
        messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
        with pytest.raises(openai.BadRequestError) as over:
            await client.chat.completions.create(messages=messages, **asked)
        assert over.value.code == "context_length_exceeded"
        said = answer.choices[0].message.content
    return Reward(float(said == prompt.answer), {"counted": float(chunks[-1].usage.completion_tokens)})


def test_the_client_of_openai_streams_calls_tools_and_meets_its_errors(table: Any, chat_ml: Any) -> None:
    def say(request: Request) -> Any:
        called = "<tool_response>42</tool_response>" in chat_ml.decode(list(request.prompt_ids))
        return [*chat_ml.encode("42" if called else f"I add. {CALL}"), 2]

    async def work(at: Any) -> Any:
        return await at.group(Prompt(0, "2 + 40", "42"))

    group, columns = table(agent("streams"), say, work, tokenizer=chat_ml, max_tokens=900, max_turns=2)
    first, second = [*chat_ml.encode(f"I add. {CALL}"), 2], [*chat_ml.encode("42"), 2]
    assert group.rewards == (1.0,), group
    assert group.tags["counted"] == [len(first)]
    assert group.statuses == ("truncated",)
    begin, end = (int(n) for n in group.tags["generated"][0].split(",")[1].split(":"))
    ids = columns[TOKENS][0].tolist()[group.prompt_tokens :]
    assert (ids[: len(first)], ids[begin:end]) == (first, second)
