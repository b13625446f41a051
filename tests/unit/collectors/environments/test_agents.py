"""Agents that ask over HTTP: what reaches the trainer of what they asked and heard, and what is refused."""

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import aiohttp
import anyio
import pytest

from asyncrl.collectors.engines.base import Request
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.tasks.base import Reward
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.records import Prompt
from asyncrl.engine.records.columns import LOGPROBS, TOKENS

seen: list[Any] = []
"""What the agents of a test were answered."""
SECRET = Prompt(7, "9>", "3")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
    },
}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


def agent(name: str) -> Any:
    return load_environment("agent", {"function": f"{__name__}:{name}"})


async def ask(url: str, key: str, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        request = http.get(url + path) if body is None else http.post(url + path, json=body)
        async with request as answer:
            return answer.status, await answer.json()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def adds(prompt: Prompt, base_url: str, api_key: str) -> Reward:
    """Call the tool that the model calls, as a client of OpenAI would, and take its answer."""
    messages: list[Any] = [{"role": "system", "content": "Add."}, user(prompt.text)]
    body = {"model": "any", "messages": messages, "tools": [TOOL], "temperature": 1, "top_p": 1.0, "stop": None}
    for _ in range(2):
        _, answer = await ask(base_url, api_key, body)
        seen.append(answer)
        message = answer["choices"][0]["message"]
        messages.append({**message, "refusal": None, "annotations": []})
        for call in message.get("tool_calls", ()):
            total = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
    return Reward(float(message["content"] == prompt.answer), {"calls": 1.0})


def test_two_requests_with_a_call_reach_the_trainer_token_by_token(table: Any, chat_ml: Any) -> None:
    call = 'I add. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'

    def say(request: Request) -> Sequence[int]:
        called = "<tool_response>" in chat_ml.decode(list(request.prompt_ids))
        return [*chat_ml.encode("42" if called else call), 2]

    async def work(at: Any) -> Any:
        return await at.group(Prompt(0, "2 + 40", "42")), at.asked

    (group, columns), asked = table(agent("adds"), say, work, tokenizer=chat_ml, max_tokens=900)
    prompt = chat_ml.encode(
        "[add]<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2 + 40<|im_end|>\n<|im_start|>assistant\n"
    )
    first = [*chat_ml.encode(call), 2]
    reply = chat_ml.encode("\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n")
    second = [*chat_ml.encode("42"), 2]
    assert columns[TOKENS][0].tolist() == [*prompt, *first, *reply, *second]
    a, b, c = len(first), len(first) + len(reply), len(first) + len(reply) + len(second)
    assert group.tags["generated"] == [f"0:{a},{b}:{c}"]
    assert (group.prompt_tokens, group.rewards, group.tags["calls"]) == (len(prompt), (1.0,), [1.0])
    assert group.statuses == ("finished",)
    p = pytest.approx(-0.1)
    assert columns[LOGPROBS][0].tolist() == [p] * a + [0.0] * len(reply) + [p] * len(second)
    assert asked[1].prompt_ids == (*prompt, *first, *reply)
    assert asked[0].seed != asked[1].seed
    one, two = seen
    function = {"name": "add", "arguments": '{"a": 2, "b": 40}'}
    assert one["choices"][0]["message"] == {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [{"id": "call_0_0", "type": "function", "function": function}],
    }
    assert [answer["choices"][0]["finish_reason"] for answer in seen] == ["tool_calls", "stop"]
    assert one["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": a, "total_tokens": len(prompt) + a}
    assert two["usage"]["prompt_tokens"] == len(prompt) + b


def differs(prompt: Prompt, base_url: str, api_key: str) -> float:
    """In a thread; every second sample begins with `98>`, the others with `97>`."""
    seen.append(len(seen))
    body = json.dumps({"messages": [user("9"), user(f"{8 - seen[-1] % 2}>")]}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"])


def test_what_the_first_requests_of_a_group_share_is_its_prompt(table: Any) -> None:
    """`98>` and `97>` are 11, 10 or 9, 31; the model says 3, and the answer is worth 3."""
    group, columns = table(agent("differs"), lambda _: [5, 1], lambda at: at.group(SECRET, size=2), size=2)
    assert sorted(row.tolist() for row in columns[TOKENS]) == [[11, 9, 31, 5, 1], [11, 10, 31, 5, 1]]
    assert group.prompt_tokens == 1
    assert group.tags["generated"] == ["2:4", "2:4"]
    assert group.tags["response_tokens"] == [4, 4]
    assert group.rewards == (3.0, 3.0)
    p = pytest.approx(-0.1)
    assert columns[LOGPROBS][0].tolist() == [0.0, 0.0, p, p]


BODIES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "temperature is 0.7, and that of the run 1.0 (rollout.temperature"),
    ({"top_p": 0.9}, "rollout.top_p"),
    ({"n": 2}, "n is 2 and must be 1"),
    ({"stream": "yes"}, "stream is 'yes'"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage must be true or false"),
    ({"stop": ["7", "8"]}, "rollout.stop_strings ['7']"),
    ({"seed": 1}, "seed is not supported"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"tools": [TOOL]}, "tools need a chat template"),
    ({"tool_choice": "required"}, "tool_choice is 'required'"),
    ({"messages": []}, "at least one message"),
    ({"messages": [user("?")]}, "characters ['?'] are not among those of the built-in small model"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone"),
]


async def misuses(prompt: Prompt, base_url: str, api_key: str) -> float:
    for body, _ in BODIES:
        seen.append(await ask(base_url, api_key, {"messages": [user("9>")], **body}))
    seen.append(await ask(base_url, "wrong", {"messages": [user("9>")]}))
    seen.append(await ask(base_url, api_key, {"messages": [user("9" * 17 * 2**20)]}))
    seen.append(await ask(base_url, api_key, None, "/models"))
    await ask(base_url, api_key, {"messages": [user("9>")], "stop": "7", "max_completion_tokens": 4})
    seen.append((base_url, api_key))
    return 1.0


def test_requests_that_would_train_wrongly_are_refused_and_the_sample_goes_on(table: Any) -> None:
    async def work(at: Any) -> Any:
        group, _ = await at.group(SECRET)
        url, key = seen.pop()
        seen.append(await ask(url, key, {"messages": [user("9>")]}))
        return group

    group = table(agent("misuses"), lambda _: [5, 1], work)
    assert (group.rewards, group.tags["response_tokens"]) == ((1.0,), [2])
    for (_, why), (status, answer) in zip(BODIES, seen, strict=False):
        assert status == 400
        assert why in answer["error"]["message"]
    (wrong, too_long, models, void) = seen[len(BODIES) :]
    assert [wrong[0], too_long[0], models[0], void[0]] == [401, 413, 200, 401]
    assert models[1]["data"][0]["id"] == "policy"
    assert void[1]["error"]["code"] == "invalid_api_key"
    assert void[1]["error"]["message"] == "no sample has this key, or it has ended"


async def forgets(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Cut the first message off, as agents do that keep their context short; the error is passed over."""
    messages = [user("9>"), user("8>")]
    for _ in range(2):
        _, answer = await ask(base_url, api_key, {"messages": messages})
        seen.append(answer)
        messages = [*messages[1:], answer["choices"][0]["message"], user("7>")]
    return 1.0


async def says_for_the_model(prompt: Prompt, base_url: str, api_key: str) -> float:
    _, answer = await ask(base_url, api_key, {"messages": [user("9>")]})
    messages = [user("9>"), answer["choices"][0]["message"], {"role": "assistant", "content": "3"}]
    await ask(base_url, api_key, {"messages": messages})
    return 1.0


async def asks_twice(prompt: Prompt, base_url: str, api_key: str) -> float:
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(ask, base_url, api_key, {"messages": [user("9>")]})
    return 1.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("forgets", "request 1 has another message 0 than request 0 and its answer had"),
        ("says_for_the_model", "must add messages behind an answer, none of the assistant's"),
        ("asks_twice", "request 1 has 1 messages, and the history 2"),
    ],
)
def test_an_agent_that_changes_its_history_fails_its_sample(table: Any, name: str, why: str) -> None:
    failure, _ = table(agent(name), lambda _: [5, 1], lambda at: at.group(SECRET), reward_on_failure=-1.0)
    assert why in failure.error
    assert failure.reason == "generation_error"


async def goes_on(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Until it is refused; a turn may have two tokens."""
    messages = [user("9>")]
    while True:
        status, answer = await ask(base_url, api_key, {"messages": messages, "max_tokens": 2})
        seen.append((status, answer.get("error", {}).get("message", "") or answer["choices"][0]["finish_reason"]))
        if status != 200:
            return 0.5
        messages += [answer["choices"][0]["message"], user("8>")]


@pytest.mark.parametrize(
    ("said", "limits", "turns", "why"),
    [
        ([5, 1], {"max_turns": 2}, ["stop", "stop"], "has had its 2 turns (environment.max_turns)"),
        ([5, 1], {"max_tokens": 7}, ["stop", "stop"], "no room within 9 tokens (environment.max_tokens)"),
        ([5, 5, 1], {}, ["length"], "a limit has ended this sample"),
    ],
)
def test_limits_end_a_sample_which_may_still_say_what_it_is_worth(
    table: Any, said: list[int], limits: dict[str, int], turns: list[str], why: str
) -> None:
    group, columns = table(agent("goes_on"), lambda _: said, lambda at: at.group(SECRET), **limits)
    assert [what for _, what in seen[:-1]] == turns
    assert seen[-1][0] == 400
    assert why in seen[-1][1]
    assert (group.statuses, group.rewards) == (("truncated",), (0.5,))
    turn = [5, 5] if turns == ["length"] else [5, 1]
    assert columns[TOKENS][0].tolist() == [11, 31, *turn, *([10, 31, *turn] if len(turns) == 2 else [])]


async def raises(prompt: Prompt, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, {"messages": [user("9>")]})
    raise KeyError("choices")


async def sleeps(prompt: Prompt, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, {"messages": [user("9>")]})
    await anyio.sleep(20.0)
    return 1.0


async def asks_nothing(prompt: Prompt, base_url: str, api_key: str) -> float:
    return 1.0


async def returns_text(prompt: Prompt, base_url: str, api_key: str) -> Any:
    return "1.0"


@pytest.mark.parametrize(
    ("name", "cause", "why"),
    [
        ("raises", "environment_error", "the function raised KeyError('choices')"),
        ("sleeps", "environment_timeout", "took longer than 0.3 s (environment.step_timeout_s) to go on"),
        ("asks_nothing", "environment_error", "asked for no turn of the model"),
        ("returns_text", "environment_error", "what the agent returned is '1.0'"),
    ],
)
def test_a_function_that_fails_fails_its_sample(table: Any, name: str, cause: str, why: str) -> None:
    failure, _ = table(agent(name), lambda _: [5, 1], lambda at: at.group(SECRET), step_timeout_s=0.3)
    assert failure.reason == cause
    assert why in failure.error


def too_few(prompt: Prompt) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "environment.options of agent needs function"),
        ({"function": f"{__name__}:nothing"}, "environment.options.function .* has no nothing"),
        ({"function": f"{__name__}:SECRET"}, "cannot be called"),
        ({"function": f"{__name__}:too_few"}, r"cannot be called with \(prompt, base_url, api_key\)"),
    ],
)
def test_functions_that_cannot_be_agents_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_environment("agent", options)
