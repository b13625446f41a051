"""Whatever an agent sends, it is answered in OpenAI's form: with a turn, or with an error that says what is wrong.

A few damages of each request in plain pytest, 10,000 with `-m soak`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import given, settings

from asyncrl.collectors.engines.base import Result
from asyncrl.collectors.environments.agents.chat import Drawn
from asyncrl.collectors.environments.agents.history import Rendering
from asyncrl.collectors.environments.agents.proxy import SESSION, Proxy
from asyncrl.collectors.environments.agents.sample import AgentSample
from asyncrl.collectors.environments.conversation import Limits
from asyncrl.engine.testing.conformance.damages import RANDOMS, inputs

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}},
}
SAID = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}]
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
PLAIN = {"model": "any", "messages": SAID, "temperature": 1.0, "top_p": 1.0, "max_tokens": 50, "stop": ["7"], "n": 1}
TOOLS = {"messages": SAID, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "stream": True}
TURN = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BEHIND = {"messages": [*SAID, TURN, {"role": "tool", "tool_call_id": "call_0_0", "content": "3"}], "tools": [TOOL]}
BODIES = {"plain": PLAIN, "tools": {**TOOLS, "stream_options": {"include_usage": True}}, "behind": BEHIND}
FIRST = {"behind": {"messages": SAID, "tools": [TOOL]}}
"""What comes before a request that is damaged."""
KINDS = ("application/json", "application/json; charset=latin-1", "application/json; charset=nope", "x", "text/plain")


async def respond(_asked: Sequence[int], _seed: int, _longest: int) -> Result:
    text = [10 + ord(c) for c in '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>']
    return Result((*text, 2), (-0.5,) * (len(text) + 1), ((0, 0, len(text) + 1),), "stop")


@dataclass(frozen=True)
class Bench:
    """A loop in a thread of its own, with the proxy and a client in it."""

    portal: BlockingPortal
    proxy: Proxy
    http: aiohttp.ClientSession
    rendering: Rendering

    def ask(self, first: Any, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        """Send a request of a sample of its own, behind a right one if there is a `first`."""
        answer: tuple[int, str] = self.portal.call(self._ask, first, body, headers)
        return answer

    async def _ask(self, first: Any, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        limits = Limits(4, 4000, 1000, 30.0, 5.0, "feed_back")
        sample = AgentSample(self.rendering, limits, most=4000, seed=1, temperature=1.0, respond=respond)
        found: list[tuple[int, str]] = []
        async with self.proxy.admit(sample) as (url, key):

            async def solve() -> None:
                if first is not None:
                    found.append(await self._send(url, json.dumps(first).encode(), {SESSION: key}))
                    assert found.pop()[0] == 200
                found.append(await self._send(url, body, {SESSION: key, **headers}))

            await sample.serve(solve)
        # A request that changes its history ends the sample: its agent may not hear of that any more.
        return found[0] if found else (400, '{"error": {"message": "ended"}}')

    async def _send(self, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        async with self.http.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
            return answer.status, await answer.text()


@contextmanager
def bench(chat_ml: Any) -> Iterator[Bench]:
    async def client() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    with start_blocking_portal() as portal:
        proxy = Proxy(Drawn(1.0, ("7",)))
        running = portal.start_task_soon(proxy.run)
        http = portal.call(client)
        try:
            yield Bench(portal, proxy, http, Rendering(chat_ml, [2], chat=True))
        finally:
            portal.call(http.close)
            running.cancel()


@pytest.fixture(scope="module")
def at(chat_ml_once: Any) -> Iterator[Bench]:
    with bench(chat_ml_once) as one:
        yield one


@pytest.mark.parametrize("name", BODIES)
def test_the_right_request_is_answered(name: str, at: Bench) -> None:
    """Otherwise the damaged ones would all be refused for nothing."""
    status, text = at.ask(FIRST.get(name), json.dumps(BODIES[name]).encode(), {"Content-Type": KINDS[0]})
    assert (status, "call_" in text) == (200, name != "plain"), text


def _check(name: str, random: Random, at: Bench) -> None:
    for body in inputs(random, json.dumps(BODIES[name]).encode(), lines=True):
        kind = random.choice((KINDS[0], *KINDS))
        status, text = at.ask(FIRST.get(name), body, {"Content-Type": kind})
        if status == 200:
            assert "choices" in text
        else:
            assert status in (400, 401)
            assert json.loads(text)["error"]["message"]


@pytest.mark.parametrize("name", BODIES)
@given(random=RANDOMS)
@settings(max_examples=2, deadline=None)
def test_damaged_requests_are_answered_or_refused(name: str, random: Random, at: Bench) -> None:
    _check(name, random, at)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BODIES)
@given(random=RANDOMS)
@settings(max_examples=100, deadline=None)
def test_many_damaged_requests_are_answered_or_refused(name: str, random: Random, at: Bench) -> None:
    _check(name, random, at)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Session-ID: none\r\nContent-Length: 2\r\n\r\n{}"


def _check_raw(random: Random, at: Bench) -> None:
    """Send bytes that may be no HTTP at all; the proxy then still answers the next request."""

    async def send(raw: bytes) -> None:
        async with await anyio.connect_tcp("127.0.0.1", at.proxy._port) as stream:
            await stream.send(raw)
            await stream.send_eof()
            with anyio.move_on_after(5):
                try:
                    while True:
                        assert not (await stream.receive()).startswith(b"HTTP/1.1 5")
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    pass

    for raw in inputs(random, HEAD, lines=False):
        at.portal.call(send, raw)
    status, _ = at.ask(None, json.dumps(PLAIN).encode(), {"Content-Type": KINDS[0]})
    assert status == 200


@given(random=RANDOMS)
@settings(max_examples=2, deadline=None)
def test_bytes_that_are_no_http_do_no_harm(random: Random, at: Bench) -> None:
    _check_raw(random, at)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(random=RANDOMS)
@settings(max_examples=60, deadline=None)
def test_many_bytes_that_are_no_http_do_no_harm(random: Random, at: Bench) -> None:
    _check_raw(random, at)


@pytest.mark.parametrize("text", ["\\ud800", "\\udfff a", "\\ud83d"])
def test_half_of_a_surrogate_pair_is_refused_by_name(text: str, at: Bench) -> None:
    """Tokenizers raise a TypeError for it, which would end the sample."""
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'
    status, said = at.ask(None, body.encode(), {"Content-Type": KINDS[0]})
    assert status == 400
    assert "the body is not JSON of whole characters" in json.loads(said)["error"]["message"]
